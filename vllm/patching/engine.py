# SPDX-License-Identifier: Apache-2.0
"""What a sweep needs of an engine, offline or serving."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.patching.grid import Facts
from vllm.patching.questions import READOUT, Ask, Reply, Steering
from vllm.v1.capture.consumers.memory.api import keepers, leased, store_with
from vllm.v1.residual.tap import Shapes
from vllm.v1.steering.errors import fail
from vllm.v1.steering.frontend.admission import REQUEST_FIELDS
from vllm.v1.steering.frontend.frontend import SteeringFrontend

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.config import VllmConfig
    from vllm.patching.study import Plan
    from vllm.v1.capture.frontend.disabled import NoCapture


class Engine(NamedTuple):
    """The facts about an engine, and what it keeps."""

    facts: Facts
    tokenizer: Any
    """None if the engine has none."""
    capture: "NoCapture"
    check: Callable[[Steering], Any]
    """Refuses entries of `steering_vectors` that do not fit the model."""


def engine_of(
    config: "VllmConfig", get_tokenizer: Callable[[], Any], processor: Any
) -> Engine:
    """Check that an engine can patch.

    Args:
        config: of the engine.
        get_tokenizer: the engine's method, which is not called if it has none.
        processor: the engine's `InputProcessor`, which has the front ends.

    Raises:
        SteeringValidationError: it does not steer.

    """
    steering = processor.residual.steering
    if not isinstance(steering, SteeringFrontend):
        raise fail(
            "patch_sweep: this engine does not patch; start it with --enable-patching, "
            "or LLM(enable_patching=True) offline",
            "enable_patching",
            False,
        )
    model = config.model_config
    capture = processor.residual.capture
    keeping = [(name, one.name_key) for name, one in keepers(capture).items()]
    keeping.sort(key=lambda keeper: keeper[1] != "run")
    vocabulary = model.get_vocab_size()
    most = model.max_logprobs
    facts = Facts(
        config.capture_config.hook_points or {},
        heads_of(config.capture_config.point_shapes),
        model.max_model_len,
        vocabulary,
        vocabulary if most < 0 else most,
        keeping[0] if keeping else None,
    )
    admission = steering.admission

    tokenizer = None if model.skip_tokenizer_init else get_tokenizer()

    def check(entries: Steering) -> None:
        admission.parse({"steering_vectors": entries}, REQUEST_FIELDS)

    return Engine(facts, tokenizer, capture, check)


def heads_of(shapes: Shapes) -> dict[str, int]:
    """The number of heads at the hook points that have heads, alike in all layers."""
    counts: dict[str, set[int]] = {}
    for of_layer in shapes.values():
        for hook, (_, heads) in of_layer.items():
            counts.setdefault(hook, set()).add(heads)
    return {
        hook: max(found)
        for hook, found in counts.items()
        if len(found) == 1 and max(found)
    }


@contextmanager
def holding(capture: "NoCapture", plan: "Plan", keep: bool) -> Iterator[None]:
    """Keep the run of a sweep for as long as it takes.

    Args:
        capture: the front end of capture.
        plan: of the sweep.
        keep: whether a run that is captured for the sweep stays afterwards.

    """
    with ExitStack() as ending:
        if plan.run is not None:
            ending.enter_context(leased(capture, plan.run))
            if plan.capture is not None and not keep:
                ending.callback(drop_run, capture, plan.run)
        yield


def drop_run(capture: "NoCapture", name: str) -> bool:
    """Drop a run; returns whether it was kept."""
    store = store_with(capture, name)
    if store is not None:
        store.drop(name)
    return store is not None


def params_of(ask: Ask) -> "SamplingParams":
    """The parameters of a request of a sweep."""
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        detokenize=False,
        skip_clone=True,  # No other request has them.
    )
    if ask.tokens:
        params.logprob_token_ids = list(ask.tokens)
    if ask.top:
        params.logprobs = ask.top
    if ask.steering:
        params.steering_vectors = dict(ask.steering)
    if ask.capture is not None:
        params.capture, params.capture_wait = dict(ask.capture), True
    if ask.probe is not None:
        spec = {"kind": "probe", "probe": ask.probe, "positions": "last_prompt"}
        params.readouts = {READOUT: spec}
    return params


def reply_of(ask: Ask, output: "RequestOutput") -> Reply:
    """What a request's output says.

    Raises:
        RuntimeError: it failed.

    """
    sample = output.outputs[0]
    for result in (output.capture_results or {}).values():
        if result.status != "ok":
            raise RuntimeError(f"the run could not be kept: {result.error}")
    logprobs = sample.logprobs[0] if sample.logprobs else {}
    found = {token: one.logprob for token, one in logprobs.items()}
    if ask.tokens and not found.keys() >= set(ask.tokens):
        raise RuntimeError(f"the request ended early: {sample.finish_reason}")
    if ask.probe is None:
        return Reply(found)
    result = (sample.readouts or {})[READOUT]
    if result.error is not None:
        raise RuntimeError(f"the probe could not be read: {result.error}")
    return Reply(found, float(result["values"][-1][0]))
