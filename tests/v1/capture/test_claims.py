# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.v1.capture.claims import Claims
from vllm.v1.capture.errors import CaptureValidationError


def claims() -> Claims:
    files, other = SimpleNamespace(claims_request_id=True), SimpleNamespace()
    return Claims({"files": files, "more": files, "other": other})


def spec(**fields: Any) -> dict[str, Any]:
    return {"hooks": {"post_block": [0]}, **fields}


def test_a_name_that_a_request_under_way_has_is_refused() -> None:
    taken, capture = claims(), {"files": spec(request_id="a", tag="t")}
    taken.check(capture)
    taken.take(capture, "first")
    with pytest.raises(CaptureValidationError, match="'a'.*another one") as refused:
        taken.check(capture)
    assert refused.value.parameter == "capture.files.request_id"


@pytest.mark.parametrize(
    "capture",
    [
        {"files": spec(request_id="b", tag="t")},
        {"files": spec(request_id="a", tag="u")},
        {"files": spec(request_id="a")},
        {"files": spec()},
        {"more": spec(request_id="a", tag="t")},
        None,
    ],
)
def test_other_names_are_free(capture: Any) -> None:
    taken = claims()
    taken.take({"files": spec(request_id="a", tag="t")}, "first")
    taken.check(capture)


def test_a_name_is_free_again_when_its_request_is_done() -> None:
    taken, capture = claims(), {"files": spec(request_id="a")}
    taken.take(capture, "first")
    taken.release("second")
    with pytest.raises(CaptureValidationError):
        taken.check(capture)
    taken.release("first")
    taken.check(capture)


def test_consumers_that_name_nothing_take_no_names() -> None:
    taken, capture = claims(), {"other": spec(request_id="a")}
    taken.take(capture, "first")
    taken.check(capture)
