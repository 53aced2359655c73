# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.v1.capture.capabilities import capabilities_of
from vllm.v1.capture.errors import CaptureValidationError
from vllm.v1.capture.frontend.path_locks import PathLocks
from vllm.v1.residual.capture_plan import CapturePlan, Reader, TapGroup


class Files:
    """Claims a place for each sample, and treats `?` and `_` as equal."""

    def claimed_places(self, raw: Any, request_id: str, num_samples: int) -> list[str]:
        name = (raw.get("request_id") or request_id).replace("?", "_")
        place = f"{raw.get('tag', 'default')}/{name}"
        return [place] if num_samples == 1 else [f"{place}-{n}" for n in range(9)]


def plan_of(request_id: str = "cmpl-1", num_samples: int = 1) -> CapturePlan:
    return CapturePlan(request_id, 4, (), "", num_samples)


def claims() -> PathLocks:
    files, other = Files(), SimpleNamespace()
    return PathLocks(capabilities_of({"files": files, "more": files, "other": other}))


def is_free(taken: PathLocks, capture: Any) -> bool:
    plan = plan_of()
    try:
        taken.reserve(capture, plan)
    except CaptureValidationError:
        return False
    taken.release(id(plan))
    return True


def spec(**fields: Any) -> dict[str, Any]:
    return {"hooks": {"post_block": [0]}, **fields}


def test_a_name_that_a_request_in_flight_has_is_refused() -> None:
    taken, capture = claims(), {"files": spec(request_id="a", tag="t")}
    taken.reserve(capture, plan_of())
    taken.take(capture, "first", plan_of())
    with pytest.raises(CaptureValidationError, match="'t/a'.*wait for it") as refused:
        taken.reserve(capture, plan_of())
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
    taken.take({"files": spec(request_id="a", tag="t")}, "first", plan_of())
    taken.reserve(capture, plan_of())


@pytest.mark.parametrize(
    ("fields", "plan"),
    [
        ({"request_id": "a?b", "tag": "default"}, plan_of()),
        ({"request_id": "a_b"}, plan_of()),
        ({}, plan_of("a_b")),
        ({"request_id": "c-0"}, plan_of()),
        ({"request_id": "c"}, plan_of(num_samples=2)),
    ],
)
def test_what_would_be_the_same_place_is_refused_however_it_is_named(
    fields: dict[str, Any], plan: CapturePlan
) -> None:
    taken = claims()
    taken.take({"files": spec(request_id="a_b")}, "first", plan_of())
    taken.take({"files": spec(request_id="c")}, "second", plan_of(num_samples=3))
    with pytest.raises(CaptureValidationError, match="wait for it"):
        taken.reserve({"files": spec(**fields)}, plan)


def test_a_consumer_may_claim_just_what_specs_name() -> None:
    taken = PathLocks(
        capabilities_of({"files": SimpleNamespace(claims_request_id=True)})
    )
    capture = {"files": spec(request_id="a", tag="t")}
    taken.take(capture, "first", plan_of())
    taken.take({"files": spec()}, "second", plan_of("a"))
    taken.reserve({"files": spec()}, plan_of("a"))
    taken.reserve({"files": spec(request_id="a")}, plan_of())
    with pytest.raises(CaptureValidationError, match="'t/a'"):
        taken.reserve(capture, plan_of())


def test_if_one_name_is_taken_none_of_a_request_is_kept() -> None:
    taken, held = claims(), plan_of()
    taken.reserve({"more": spec(request_id="b")}, held)
    both = {"files": spec(request_id="a"), "more": spec(request_id="b")}
    with pytest.raises(CaptureValidationError, match="'default/b'.*wait"):
        taken.reserve(both, plan_of())
    assert is_free(taken, {"files": spec(request_id="a")})
    taken.release(id(held))
    assert is_free(taken, both)


def test_a_name_is_kept_until_the_request_is_done_or_not_begun() -> None:
    taken, capture = claims(), {"files": spec(request_id="a")}
    plan = plan_of()
    taken.reserve(capture, plan)
    assert not is_free(taken, capture)
    assert not is_free(taken, capture), "the first still has it"
    taken.take(capture, "first", plan)
    del plan
    assert not is_free(taken, capture)
    taken.release("first")
    assert is_free(taken, capture)
    taken.reserve(capture, plan_of())
    assert is_free(taken, capture), "a request that did not begin gives its name up"
    refused = plan_of()
    taken.reserve(capture, refused)
    taken.release(id(refused))
    assert is_free(taken, capture), "and one that is refused, though its plan is there"


def captured(number: int, instance: str = "files", num_samples: int = 1) -> CapturePlan:
    """A plan for a request that is captured by a global spec."""
    reader = Reader(instance, ((3, 4),))
    group = TapGroup(((0, "post_block"),), ((3, 4),), (reader,))
    return CapturePlan("cmpl-1", 4, (group,), str(number), num_samples)


def test_a_request_captured_by_a_global_spec_gets_another_name() -> None:
    taken, held = claims(), plan_of()
    taken.reserve({"files": spec(request_id="cmpl-1-3")}, held)
    plans = [taken.reserve(None, captured(number)) for number in range(3)]
    names = [plan.client_request_id for plan in plans]
    assert names == ["cmpl-1", "cmpl-1-2", "cmpl-1-4"]
    assert [plan.reply_to for plan in plans] == ["0", "1", "2"], "nothing else differs"
    taken.take(None, "second", plans[1])
    taken.release("second")
    again = taken.reserve({}, captured(4))
    assert again.client_request_id == "cmpl-1-2"


def test_a_request_with_a_spec_is_refused_for_a_name_of_a_global_spec() -> None:
    taken, asked = claims(), {"other": spec()}
    first = taken.reserve(asked, captured(0))
    with pytest.raises(CaptureValidationError, match="capture.files.request_id"):
        taken.reserve(asked, captured(1))
    assert first.client_request_id == "cmpl-1"


def test_samples_have_their_names_together() -> None:
    taken = claims()
    kept = taken.reserve({"files": spec(request_id="cmpl-1-2-5")}, plan_of())
    first = taken.reserve(None, captured(0, num_samples=2))
    second = taken.reserve(None, captured(1, num_samples=2))
    names = [plan.client_request_id for plan in (kept, first, second)]
    assert names == ["cmpl-1", "cmpl-1", "cmpl-1-3"]


def test_of_what_keeps_no_files_names_may_be_the_same() -> None:
    taken = claims()
    plans = [taken.reserve(None, captured(n, "other")) for n in range(2)]
    assert [plan.client_request_id for plan in plans] == ["cmpl-1"] * 2
