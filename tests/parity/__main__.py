# SPDX-License-Identifier: Apache-2.0
"""Compares cases from the command line: `python -m tests.parity [NAME ...]`.

A name selects all cases whose name contains it.
"""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor

import tests.conftest  # noqa: F401
from tests.parity import results
from tests.parity.cases import Case
from tests.parity.families import CASES
from tests.parity.processes import CaseFailed, prove


def look(case: Case, options: argparse.Namespace) -> str:
    """Compare a case; prints a line and its problems."""
    started = time.monotonic()
    try:
        compiled = {"enforce_eager": False} if options.graphs else {}
        compared, points = prove(case, options.device, **compiled)
    except CaseFailed as failure:
        found = results.failure(failure.summary)
        text = f"FAILED {case.name}: {failure.summary}\n{str(failure)[-1500:]}"
    else:
        found = results.outcome(case, compared, points)
        lines = [f"    {problem}" for problem in compared.problems[:8]]
        verdict = "WRONG" if lines else "proven"
        head = (
            f"{verdict} {case.name}: rows {compared.row_error:.1e}, "
            f"change {compared.change_error:.1e}, logits {compared.logit_error:.1e}, "
            f"{time.monotonic() - started:.0f} s"
        )
        lines += [f"    {hook}: {why}" for hook, why in compared.unproven.items()]
        text = "\n".join([head, *lines])
    if options.record:
        results.record({case: found}, options.device)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("-j", "--jobs", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--graphs", action="store_true", help="compiled, in CUDA graphs on a GPU"
    )
    parser.add_argument("--record", action="store_true", help="in results.json")
    options = parser.parse_args()
    chosen = [
        case
        for case in CASES
        if not options.names or any(name in case.name for name in options.names)
    ]
    unable = {
        case: results.failure(reason)
        for case in chosen
        if (reason := case.obstacle(options.device))
    }
    chosen = [case.on(options.device) for case in chosen if case not in unable]
    if options.record:
        results.record(unable, options.device)
    for case, found in unable.items():
        print(f"unable {case.name}: {found['reason']}")
    with ThreadPoolExecutor(options.jobs) as pool:
        for line in pool.map(lambda case: look(case, options), chosen):
            print(line, flush=True)


if __name__ == "__main__":
    main()
