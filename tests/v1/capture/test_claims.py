# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.v1.capture.claims import Claims
from vllm.v1.capture.elsewhere import NobodyElse
from vllm.v1.capture.errors import CaptureValidationError


class Plan:
    """Of a request."""


def claims(elsewhere: NobodyElse | None = None) -> Claims:
    files, other = SimpleNamespace(claims_request_id=True), SimpleNamespace()
    return Claims({"files": files, "more": files, "other": other}, elsewhere)


def spec(**fields: Any) -> dict[str, Any]:
    return {"hooks": {"post_block": [0]}, **fields}


def test_a_name_that_a_request_under_way_has_is_refused() -> None:
    taken, capture = claims(), {"files": spec(request_id="a", tag="t")}
    taken.reserve(capture, Plan())
    taken.take(capture, "first", Plan())
    with pytest.raises(CaptureValidationError, match="'a'.*another one") as refused:
        taken.reserve(capture, Plan())
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
    taken.take({"files": spec(request_id="a", tag="t")}, "first", Plan())
    taken.reserve(capture, Plan())


def test_a_name_is_free_again_when_its_request_is_done() -> None:
    taken, capture = claims(), {"files": spec(request_id="a")}
    taken.take(capture, "first", Plan())
    taken.release("second")
    with pytest.raises(CaptureValidationError):
        taken.reserve(capture, Plan())
    taken.release("first")
    taken.reserve(capture, Plan())


def test_consumers_that_name_nothing_take_no_names() -> None:
    taken, capture = claims(), {"other": spec(request_id="a")}
    taken.take(capture, "first", Plan())
    taken.reserve(capture, Plan())


class Elsewhere(NobodyElse):
    """Names that are taken by this process and by another."""

    def __init__(self) -> None:
        self.here: set[Any] = set()
        self.there: set[Any] = set()

    def take(self, name: Any) -> bool:
        if name in self.there:
            return False
        self.here.add(name)
        return True

    def free(self, name: Any) -> None:
        self.here.remove(name)


A = ("files", "", "a")


def test_a_name_that_another_server_has_is_refused_and_nothing_is_kept() -> None:
    elsewhere = Elsewhere()
    taken, plan = claims(elsewhere), Plan()
    elsewhere.there.add(("more", "", "b"))
    capture = {"files": spec(request_id="a"), "more": spec(request_id="b")}
    with pytest.raises(CaptureValidationError, match="'b'.*another one"):
        taken.reserve(capture, plan)
    assert not elsewhere.here
    elsewhere.there.clear()
    taken.reserve(capture, plan)
    assert len(elsewhere.here) == 2


def test_a_name_is_kept_until_the_request_is_done_or_not_begun() -> None:
    elsewhere = Elsewhere()
    taken, capture = claims(elsewhere), {"files": spec(request_id="a")}
    plan, other = Plan(), Plan()
    taken.reserve(capture, plan)
    taken.reserve(capture, other)
    del other
    assert elsewhere.here == {A}, "the first still has it"
    taken.take(capture, "first", plan)
    del plan
    assert elsewhere.here == {A}
    taken.release("first")
    assert not elsewhere.here
    taken.reserve(capture, Plan())
    assert not elsewhere.here, "a request that did not begin gives its name up"
