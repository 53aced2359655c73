# SPDX-License-Identifier: Apache-2.0
"""Measures the deviation of the library's rows in bfloat16 from float32.

The comparison measures the same for its bounds (`bounds.py`). `python -m
tests.parity.rounding [NAME ...]` prints it for the cases that are in bfloat16 on a GPU;
a name selects all cases whose name contains it.
"""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

import tests.conftest  # noqa: F401
from tests.parity.cases import Case
from tests.parity.distance import relative
from tests.parity.engine import MAX_TOKENS, requests, vector
from tests.parity.families import CASES
from tests.parity.recipe import HOOKS
from tests.parity.reference import Reference, Stream, Tap


class Rounded(NamedTuple):
    """The rows of a hook point in one request."""

    error: float
    """The largest deviation of a row, relative to the row's norm."""
    tap: Tap
    steered: Tap | None


def rounding(case: Case) -> Rounded:
    """The hook point at which bfloat16 changes the library's rows most.

    Both models are given the requests of the suite, with what the one in bfloat16
    generates, and are steered alike.
    """
    with TemporaryDirectory(prefix="parity-") as name:
        folder = case.save(Path(name))[0]
        rounded, exact = (
            Reference(folder, dtype, case.recipe, case.substitute, case.loader)
            for dtype in (torch.bfloat16, torch.float32)
        )
    taps = sorted(rounded.points, key=lambda tap: (tap[0], HOOKS.index(tap[1])))
    found = []
    for steered, prompt in requests(taps):
        fed = list(prompt)
        for _ in range(MAX_TOKENS - 1):
            _, logits = _run(rounded, steered, fed, len(prompt))
            fed.append(int(logits[-1].argmax()))
        rows, _ = _run(rounded, steered, fed, len(prompt))
        expected, _ = _run(exact, steered, fed, len(prompt))
        found += [Rounded(relative(rows[t], expected[t]), t, steered) for t in taps]
    return max(found, key=lambda one: one.error)


def _run(
    reference: Reference, steered: Tap | None, fed: Sequence[int], prompt: int
) -> tuple[Stream, torch.Tensor]:
    width = reference.model.get_input_embeddings().weight.shape[-1]
    adding = nullcontext()
    if steered is not None:
        adding = reference.adding(steered, vector(steered, width))
    with adding:
        return reference.run(fed, prompt)


def main() -> None:
    names = sys.argv[1:]
    for case in CASES:
        form = case.on("cuda")
        meant = not names or any(name in case.name for name in names)
        if not meant or form.never or form.dtype != "bfloat16":
            continue
        error, tap, steered = rounding(form)
        where = f", steered at {steered}" if steered else ""
        print(f"{case.name}: {error:.1e} at {tap}{where}")


if __name__ == "__main__":
    main()
