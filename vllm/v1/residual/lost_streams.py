# SPDX-License-Identifier: Apache-2.0
"""A request whose residual stream is no longer finite ends with an error.

NaN and infinity stay in the stream up to the logits. Where a step has a request that is
given vectors or embeddings, the runners count NaN in each request's logits as upstream
does for its metrics; a request that has some ends. What layer they came from is then
read from the keys and values that the request left: nothing is recorded before.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.exceptions import VLLMValidationError
from vllm.v1.residual.suspect_blocks import SuspectBlocks

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request

MARK = "the residual stream is no longer finite: "
"""Begins the `stop_reason` of such a request; where it happened follows."""
BlockIds = tuple[list[int], ...]
"""A request's blocks, by group of layers."""


class LostStreamError(VLLMValidationError, ValueError):
    """The vectors or embeddings of a request made its stream overflow (HTTP 400)."""


class Met(NamedTuple):
    """Layers of one worker, by what a request left in their keys and values."""

    finite: list[int]
    other: list[int]


class LostStreams:
    """Requests that have just been ended, until the reason has been found.

    Part of the scheduler; engine thread only.
    """

    def __init__(
        self, suspects: SuspectBlocks, block_ids: Callable[[str], BlockIds]
    ) -> None:
        self._suspects = suspects
        self._block_ids = block_ids
        self._lost: dict[str, BlockIds] = {}

    def add(self, request: "Request", num_nans: Mapping[str, int] | None) -> bool:
        """Whether the request must end, after a step with these counts of NaN."""
        if not num_nans or not num_nans.get(request.request_id):
            return False
        if not self._suspects.concerns(request):
            return False  # Upstream's own: its metrics count it.
        self._lost[request.request_id] = self._block_ids(request.request_id)
        return True

    def has(self, request: "Request") -> bool:
        """Whether `add` has just said so."""
        return request.request_id in self._lost

    def take(self) -> dict[str, BlockIds]:
        """Those of the step that has just been accounted for, with their blocks."""
        lost, self._lost = self._lost, {}
        return lost


def explain(core: "EngineCore", outputs: "Mapping[int, EngineCoreOutputs]") -> None:
    """Say in the outputs of a step where the streams of lost requests were lost.

    Their blocks are free, but no step has been scheduled since that writes to them.
    """
    scheduler: Any = core.scheduler
    if not (lost := scheduler.lost_streams.take()):
        return
    from vllm.v1.worker.lost_layer import layers_met

    reasons = {
        request_id: describe(
            core.model_executor.collective_rpc(layers_met, args=(blocks,))
        )
        for request_id, blocks in lost.items()
    }
    for of_client in outputs.values():
        for output in of_client.outputs:
            if output.request_id in reasons:
                output.stop_reason = MARK + reasons[output.request_id]


def describe(met: Sequence[Met]) -> str:
    """Between which layers the stream was lost, from what each worker has found."""
    lost = min((layer for one in met for layer in one.other), default=None)
    finite = [layer for one in met for layer in one.finite]
    if lost is None:
        return f"NaN or infinity came up behind the attention of layer {max(finite)}"
    before = max((layer for layer in finite if layer < lost), default=None)
    met_it = f"NaN or infinity reached the attention of layer {lost}"
    if before is None:
        return f"{met_it}, the first that keeps keys and values"
    return f"{met_it}; what reached that of layer {before} was finite"


def is_lost(output: "RequestOutput") -> bool:
    """Whether an output tells that a request's stream was lost. Quick: all pass."""
    return any(
        sample.finish_reason == "error" and _reason(sample) is not None
        for sample in output.outputs
    )


async def raise_error(
    engine: "AsyncLLM", request_id: str, output: "RequestOutput", params: Any
) -> None:
    """Raise the error of a request whose stream was lost.

    Args:
        engine: of this front end.
        request_id: as the engine knows the request.
        output: tells of it.
        params: as the client has sent them.

    Raises:
        LostStreamError: says where.

    """
    await engine.abort(request_id, internal=True)  # Other samples may be in flight.
    engine.capture.refused(output)
    raise _error_in(output, params)


def _error_in(output: "RequestOutput", params: Any) -> LostStreamError:
    reason = next(filter(None, map(_reason, output.outputs)))
    given = (
        name
        for name in (
            "steering_vectors",
            "prefill_steering_vectors",
            "decode_steering_vectors",
            "steering_name",
        )
        if getattr(params, name) is not None
    )
    name = next(given, "prompt")
    return LostStreamError(
        f"{name}: {MARK}{reason}. Its numbers are too large for this model: give "
        "smaller vectors, scales or embeddings",
        parameter=name,
    )


def _reason(sample: "CompletionOutput") -> str | None:
    if not isinstance(sample.stop_reason, str):
        return None
    mark, _, reason = sample.stop_reason.partition(MARK)
    return reason if not mark else None
