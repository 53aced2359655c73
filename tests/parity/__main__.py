# SPDX-License-Identifier: Apache-2.0
"""Compare cases from the command line: `python -m tests.parity [-j N] [NAME ...]`.

A name stands for all cases that it is a part of. Nothing is recorded.
"""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor

import tests.conftest  # noqa: F401
from tests.parity.cases import Case
from tests.parity.families import CASES
from tests.parity.processes import CaseFailed, prove


def look(case: Case, limit: int) -> str:
    """One line on a case, and what is wrong with it."""
    started = time.monotonic()
    try:
        compared, points = prove(case)
    except CaseFailed as failure:
        return f"FAILED {case.name}\n{str(failure)[-limit:]}"
    lines = [f"    {problem}" for problem in compared.problems[:8]]
    kinds = sorted({hooks for hooks in points.values()})
    verdict = "WRONG" if lines else "proven"
    head = (
        f"{verdict} {case.name}: rows {compared.row_error:.1e}, "
        f"change {compared.change_error:.1e}, logits {compared.logit_error:.1e}, "
        f"{time.monotonic() - started:.0f} s, {kinds if lines else ''}"
    )
    return "\n".join([head, *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("-j", "--jobs", type=int, default=1)
    parser.add_argument("--limit", type=int, default=1500)
    options = parser.parse_args()
    chosen = [
        case
        for case in CASES
        if not options.names or any(name in case.name for name in options.names)
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        for line in pool.map(lambda case: look(case, options.limit), chosen):
            print(line, flush=True)


if __name__ == "__main__":
    main()
