# SPDX-License-Identifier: Apache-2.0
"""Every hook point of every layer has the values that the library computes.

A vector that is added there changes the logits as in the library. In float32 a
difference is rounding, so a small tolerance distinguishes wrong places from right ones;
the negative controls verify this. In bfloat16 the tolerance is the library's own loss
in bfloat16 on this machine (`bounds.py`).

`make test` runs a representative part; `make parity` runs all, and records.
`tests/gpu/test_parity_cuda.py` runs all on a GPU.
"""

from collections.abc import Iterator

import pytest

from tests.parity.cases import Case
from tests.parity.families import CASES
from tests.parity.suite import Suite

pytestmark = pytest.mark.e2e
each_case = pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=case.name,
            marks=[] if case.representative else [pytest.mark.parity],
        )
        for case in CASES
    ],
)


@pytest.fixture(scope="module")
def device() -> str:
    return "cpu"


@pytest.fixture(scope="module")
def suite(request: pytest.FixtureRequest, device: str) -> Iterator[Suite]:
    """All selected cases, a few at a time."""
    chosen = {
        item.callspec.params["case"]: None
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and hasattr(item, "callspec")
    }
    suite = Suite(list(chosen), device)
    yield suite
    suite.close()


@each_case
def test_rows_are_those_of_the_library(case: Case, suite: Suite) -> None:
    compared, hook_points = suite.result(case)
    assert hook_points
    assert not compared.wrong_rows
    assert compared.row_error <= compared.tolerance


@each_case
def test_adding_at_a_point_changes_logits_alike(case: Case, suite: Suite) -> None:
    compared, _ = suite.result(case)
    assert not compared.wrong_changes


@each_case
def test_the_comparison_tells_what_is_a_little_wrong(case: Case, suite: Suite) -> None:
    compared, _ = suite.result(case)
    assert not compared.unnoticed


def test_cases_have_names_of_their_own() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))
