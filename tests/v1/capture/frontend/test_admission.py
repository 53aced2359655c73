# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from tests.v1.capture._sinks import KeepingConsumer
from tests.v1.capture._strategies import HOOKS
from tests.v1.capture.test_selectors import anything
from vllm.config.capture import CaptureConfig
from vllm.config.readouts import ReadoutConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.capture.consumer import CaptureConsumer
from vllm.v1.capture.errors import (
    CaptureValidationError,
    UnknownCaptureConsumerError,
)
from vllm.v1.capture.frontend.admission import Admission
from vllm.v1.capture.frontend.disabled import NoCapture
from vllm.v1.capture.selectors import parse_spec
from vllm.v1.capture.types import CaptureSpec
from vllm.v1.readouts.frontend.admission import ReadoutAdmission
from vllm.v1.residual.capture_plan import LIVE, CapturePlan, TapGroup
from vllm.v1.residual.module_info import KnownModules
from vllm.v1.steering.spec.table import as_array

WIDTH, LAYERS = 8, 4
ROW_BYTES = WIDTH * torch.float32.itemsize


class Asking(KeepingConsumer):
    """A consumer of requests, optionally with a global spec."""

    def __init__(self, everywhere: CaptureSpec | None = None) -> None:
        super().__init__()
        self.everywhere = everywhere

    def global_capture_spec(self) -> CaptureSpec | None:
        return self.everywhere

    def validate_client_spec(self, raw: Any, ctx: Any) -> CaptureSpec:
        return parse_spec(raw, ctx, "capture.asking")


class Fixed(Asking):
    reads_client_spec = False


class Rude(KeepingConsumer):
    def validate_client_spec(self, raw: Any, ctx: Any) -> CaptureSpec:
        raise TypeError("I take no such thing")


def config(rows_per_step: int = 1000, chunked: bool = True) -> Any:
    return SimpleNamespace(
        capture_config=CaptureConfig(staging_bytes=2 * rows_per_step * ROW_BYTES),
        scheduler_config=SimpleNamespace(
            enable_chunked_prefill=chunked, async_scheduling=False
        ),
        readout_config=ReadoutConfig(),
        num_speculative_tokens=0,
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            enable_expert_parallel=False,
        ),
        model_config=SimpleNamespace(
            get_hidden_size=lambda: WIDTH,
            get_vocab_size=lambda: 100,
            dtype=torch.float32,
        ),
    )


def admission(
    rows_per_step: int = 1000, chunked: bool = True, **consumers: CaptureConsumer
) -> Admission:
    options = config(rows_per_step, chunked)
    options.capture_config.hook_points = dict.fromkeys(range(LAYERS), HOOKS)
    readouts = ReadoutAdmission(options, KnownModules({}), as_array)
    return Admission(options, consumers or {"asking": Asking()}, readouts)


def plan(
    gate: Admission, capture: Any, num_prompt_tokens: int = 5, max_tokens: int = 4
) -> CapturePlan | None:
    params = SamplingParams(max_tokens=max_tokens, capture=capture)
    return gate.plan("r", params, num_prompt_tokens, "ipc://here")


def group(gate: Admission, capture: Any, **request: int) -> TapGroup:
    """The only group of a request's plan."""
    made = plan(gate, capture, **request)
    assert made is not None
    (only,) = made.groups
    return only


def ask(**spec: Any) -> dict[str, Any]:
    return {"asking": {"hooks": {"post_block": [1]}, **spec}}


@pytest.mark.parametrize("capture", [None, {}])
def test_a_request_that_asks_for_nothing_has_no_plan(capture: Any) -> None:
    assert plan(admission(), capture) is None


def test_every_request_has_what_a_consumer_captures_globally() -> None:
    gate = admission(fixed=Fixed(CaptureSpec({"pre_attn": [0, 3]}, "last_prompt")))
    found = group(gate, None)
    assert found.taps == ((0, "pre_attn"), (3, "pre_attn"))
    assert found.ranges == ((4, 5),)


@pytest.mark.parametrize(
    ("max_tokens", "found"), [(9, ((0, 1), (9, 10))), (5, ((0, 1),)), (1, ((0, 1),))]
)
def test_a_request_is_not_refused_for_what_others_want_of_every_request(
    max_tokens: int, found: Any
) -> None:
    gate = admission(log=Fixed(CaptureSpec({"pre_attn": [1]}, [9, 0])))
    readers = group(gate, None, max_tokens=max_tokens).readers
    assert [reader.ranges for reader in readers] == [found]


def test_a_request_that_reaches_nothing_of_it_is_not_captured() -> None:
    gate = admission(log=Fixed(CaptureSpec({"pre_attn": [1]}, [9])))
    assert plan(gate, None, max_tokens=5) is None


def test_hook_points_that_no_step_has_room_for_stop_the_start() -> None:
    with pytest.raises(CaptureValidationError, match="capture fewer layers"):
        admission(2, log=Fixed(CaptureSpec({"pre_attn": [0, 1, 2]}, "all")))


@pytest.mark.parametrize(
    "capture",
    [{"a\ud800": {}}, ask(tag="a\ud800"), ask(more=[{"b\ud800": 1}])],
)
def test_text_that_cannot_travel_is_refused(capture: Any) -> None:
    with pytest.raises(CaptureValidationError, match="lone surrogate"):
        plan(admission(), capture)


def test_a_number_that_cannot_travel_is_refused() -> None:
    with pytest.raises(CaptureValidationError, match="64 bits"):
        plan(admission(), ask(more=[10**40]))


def test_a_request_overrides_what_its_consumer_captures_globally() -> None:
    gate = admission(asking=Asking(CaptureSpec({"pre_attn": [0]}, "all")))
    assert group(gate, ask()).taps == ((1, "post_block"),)


@pytest.mark.parametrize(
    "spec",
    [
        CaptureSpec({"pre_attn": [LAYERS]}, "all"),
        CaptureSpec({"mlp_in": [0]}, "all"),
        CaptureSpec({"pre_attn": [0]}, "everything"),  # type: ignore[arg-type]
        CaptureSpec("pre_attn", "all"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_global_spec_stops_the_start(spec: CaptureSpec) -> None:
    with pytest.raises(CaptureValidationError, match="capture.fixed"):
        admission(fixed=Fixed(spec))


def test_a_consumer_that_reads_no_requests_or_is_not_there_is_refused() -> None:
    with pytest.raises(CaptureValidationError, match="accepts no requests"):
        plan(admission(fixed=Fixed()), {"fixed": {}})
    with pytest.raises(UnknownCaptureConsumerError, match="no consumer 'other'.*fixed"):
        plan(admission(fixed=Fixed()), {"other": {}})


def test_what_a_plugin_objects_to_is_a_refusal() -> None:
    with pytest.raises(CaptureValidationError, match="I take no such thing") as caught:
        plan(admission(rude=Rude()), {"rude": {"x": 1}})
    assert caught.value.parameter == "capture.rude"


class Answering(Asking):
    """A consumer that returns this spec for every request."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def validate_client_spec(self, raw: Any, ctx: Any) -> CaptureSpec:
        answer: CaptureSpec = self.answer
        return answer


@pytest.mark.parametrize(
    ("layers", "positions", "ranges"),
    [
        ("all", "all_prompt", ((0, 5),)),
        (range(LAYERS), (0, 1, 4), ((0, 2), (4, 5))),
        (np.arange(LAYERS), range(2, 4), ((2, 4),)),
        ([*range(LAYERS), 0], [3, 3], ((3, 4),)),
    ],
)
def test_a_plugin_may_answer_with_any_sequence(
    layers: Any, positions: Any, ranges: Any
) -> None:
    answer = Answering(CaptureSpec({"pre_attn": layers}, positions))
    found = group(admission(asking=answer), ask())
    assert found.taps == tuple((layer, "pre_attn") for layer in range(LAYERS))
    assert found.ranges == ranges


@pytest.mark.parametrize("answer", [None, {"hooks": {}}, "all"])
def test_a_plugin_that_answers_with_no_spec_is_named(answer: Any) -> None:
    with pytest.raises(CaptureValidationError, match="error in the consumer"):
        plan(admission(asking=Answering(answer)), ask())


@pytest.mark.parametrize("layers", [["a"], [[0]], [None], 9, -1, "some", True])
def test_a_layer_that_is_none_is_refused(layers: Any) -> None:
    answer = Answering(CaptureSpec({"pre_attn": layers}, "all"))
    with pytest.raises(CaptureValidationError, match="layer") as caught:
        plan(admission(asking=answer), ask())
    assert caught.value.parameter == "capture.asking.hooks.pre_attn"


@pytest.mark.parametrize("hooks", [{}, {"pre_attn": []}])
def test_a_plugin_that_wants_nothing_makes_an_empty_plan(hooks: Any) -> None:
    made = plan(admission(asking=Answering(CaptureSpec(hooks, "all"))), ask())
    assert made is not None and made.instances == ()


def test_rows_that_outputs_carry_are_read_once_more() -> None:
    params = SamplingParams(max_tokens=4, capture=ask(positions="all"))
    made = admission().plan("r", params, 5, "ipc://here", {"asking"})
    assert made is not None
    (only,) = made.groups
    assert {reader.instance for reader in only.readers} == {"asking", LIVE}
    assert made.instances == ("asking",)


@pytest.mark.parametrize("capture", [[], "asking", 3])
def test_a_capture_that_is_no_object_is_refused(capture: Any) -> None:
    with pytest.raises(CaptureValidationError, match="must map consumers"):
        plan(admission(), capture)


@pytest.mark.parametrize("flag", ["capture_wait", "capture_stream"])
def test_a_flag_that_the_engine_core_could_not_read_is_refused(flag: str) -> None:
    wrong: dict[str, Any] = {flag: "no"}
    params, said = SamplingParams(**wrong), f"{flag} must be true or false"
    with pytest.raises(CaptureValidationError, match=said):
        admission().plan("r", params, 5, "ipc://here")
    with pytest.raises(CaptureValidationError, match=said):
        NoCapture().admit("r", params, 5)


def test_more_taps_than_a_step_has_rows_are_refused() -> None:
    spec = ask(hooks={"pre_attn": "all"})
    assert plan(admission(rows_per_step=LAYERS), spec) is not None
    with pytest.raises(CaptureValidationError, match="--capture-staging-bytes"):
        plan(admission(rows_per_step=LAYERS - 1), spec)


def test_without_chunked_prefill_a_prompt_must_fit_one_step() -> None:
    spec = ask(positions="all_prompt")
    assert plan(admission(rows_per_step=5, chunked=False), spec) is not None
    with pytest.raises(CaptureValidationError, match="without chunked prefill"):
        plan(admission(rows_per_step=4, chunked=False), spec)


@given(anything)
def test_whatever_a_user_asks_for_is_a_plan_or_a_refusal(raw: Any) -> None:
    gate = admission()
    for capture in (raw, {"asking": raw}):
        try:
            plan(gate, capture)
        except CaptureValidationError as error:
            assert error.parameter and str(error)


def test_rows_behind_interventions_are_read_where_the_next_block_begins() -> None:
    spec = {"hooks": {"post_block": "all"}, "positions": "all", "after": True}
    found = group(admission(), {"asking": spec})
    assert found.taps == (
        *((layer, "pre_attn") for layer in range(1, LAYERS)),
        (LAYERS - 1, "post_block.after"),
    )
    (reader,) = found.readers
    assert reader.named(found.taps) == tuple((n, "post_block") for n in range(LAYERS))


def test_one_row_serves_those_before_and_those_behind() -> None:
    gate = admission(asking=Asking(), other=Asking())
    capture = {
        "asking": {"hooks": {"pre_attn": [1]}, "positions": "all"},
        "other": {"hooks": {"post_block": [0]}, "positions": "all", "after": True},
    }
    params = SamplingParams(max_tokens=4, capture=capture)
    made = gate.plan("r", params, 5, "ipc://here")
    assert made is not None
    (only,) = made.groups
    assert only.taps == ((1, "pre_attn"),) and made.num_taps == 1
    named = {one.instance: one.named(only.taps) for one in only.readers}
    assert named == {"asking": ((1, "pre_attn"),), "other": ((0, "post_block"),)}
    assert params.capture["other"].keys() == {"hooks", "positions"}
    with pytest.raises(CaptureValidationError, match="or none is"):
        again = SamplingParams(max_tokens=4, capture=capture)
        gate.plan("r", again, 5, "ipc://here", streaming=("asking", "other"))
    live = SamplingParams(max_tokens=4, capture=capture)
    made = gate.plan("r", live, 5, "ipc://here", streaming=("other",))
    assert made is not None
    (only,) = made.groups
    after = {one.instance: one.after for one in only.readers}
    assert after == {"asking": False, "other": True, LIVE: True}


@pytest.mark.parametrize(
    ("hook", "after", "said"),
    [("post_attn", True, "--hook-points after"), ("post_block", 1, "true or false")],
)
def test_what_is_behind_other_points_must_be_enabled(
    hook: str, after: Any, said: str
) -> None:
    with pytest.raises(CaptureValidationError, match=said) as refused:
        plan(admission(), {"asking": {"hooks": {hook: [1]}, "after": after}})
    assert refused.value.parameter == "capture.asking.after"
