# SPDX-License-Identifier: Apache-2.0
"""Ends requests whose stream is not finite, or was not steered, with an error.

NaN and infinity in the stream propagate to the logits. If a step has a request with
steering vectors or prompt embeddings, the runners count NaN in the logits of each
request, as upstream does for its metrics. A request that has any is ended. The layer
where they arose is then found in the keys and values that the request left in the KV
cache, so nothing needs to be recorded before.
"""

from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.exceptions import GracefulHTTPError, VLLMError, VLLMValidationError
from vllm.v1.residual.changed_streams import ChangedStreams

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

MARK = "the residual stream is no longer finite: "
"""Prefix of the `stop_reason` of such a request; the location follows."""
BlockIds = tuple[list[int], ...]
"""A request's KV cache blocks, by group of layers."""


class NonFiniteStreamError(VLLMValidationError, ValueError):
    """The vectors or embeddings of a request made its stream overflow (HTTP 400)."""


class Finiteness(NamedTuple):
    """A worker's layers, by whether a request left only finite keys and values."""

    finite: list[int]
    other: list[int]


class NonFiniteStreams:
    """Requests that were just ended, until the layer has been found.

    Part of the scheduler; used on the engine's thread only.
    """

    def __init__(self, changed: ChangedStreams, cache: "KVCacheManager") -> None:
        self._changed = changed
        self._cache = cache
        self._block_ids: Callable[[str], BlockIds] = cache.get_block_ids
        self._ended: dict[str, BlockIds] = {}
        self._failed: dict[str, str] = {}

    def add(self, request: "Request", output: "ModelRunnerOutput") -> bool:
        """Whether the request must end, given the output of the step.

        If steering has failed, the blocks that the step has filled leave the prefix
        cache: their hashes say that they are steered.
        """
        req_id, num_nans = request.request_id, output.num_nans_in_logits
        if output.failed and req_id in output.failed:
            self._failed[req_id] = output.failed[req_id]
            self._cache.evict_blocks(set().union(*self._block_ids(req_id)))
            return True
        if not num_nans or not num_nans.get(req_id):
            return False
        if not self._changed.concerns(request):
            return False  # As upstream, which only counts it in its metrics.
        self._ended[req_id] = self._block_ids(req_id)
        return True

    def has(self, request: "Request") -> bool:
        """Whether `add` ended the request in this step."""
        return request.request_id in self._ended or request.request_id in self._failed

    def take(self) -> tuple[dict[str, BlockIds], dict[str, str]]:
        """Return and clear the ended requests of this step.

        Returns:
            Those that are not finite, with their blocks; and the others, with reasons.

        """
        ended, self._ended = self._ended, {}
        failed, self._failed = self._failed, {}
        return ended, failed


def explain(core: "EngineCore", outputs: "Mapping[int, EngineCoreOutputs]") -> None:
    """Add to the outputs of ended requests in which layer NaN or infinity arose.

    The requests' blocks are free already, but no later step has been scheduled yet, so
    their content is intact.
    """
    scheduler: Any = core.scheduler
    ended, reasons = scheduler.residual.take_nonfinite()
    if not ended and not reasons:
        return
    from vllm.v1.worker.nonfinite_rows import layer_finiteness

    for request_id, blocks in ended.items():
        found = core.model_executor.collective_rpc(layer_finiteness, args=(blocks,))
        reasons[request_id] = MARK + describe(found)
    for of_client in outputs.values():
        for output in of_client.outputs:
            if output.request_id in reasons:
                output.stop_reason = reasons[output.request_id]


def describe(met: Sequence[Finiteness]) -> str:
    """Describe between which layers NaN arose, from the findings of all workers."""
    first = min((layer for one in met for layer in one.other), default=None)
    finite = [layer for one in met for layer in one.finite]
    if first is None:
        return f"NaN or infinity arose after the attention of layer {max(finite)}"
    before = max((layer for layer in finite if layer < first), default=None)
    reached = f"NaN or infinity reached the attention of layer {first}"
    if before is None:
        return f"{reached}, the first layer with a KV cache"
    return f"{reached}; the input of that of layer {before} was finite"


def error_in(output: "RequestOutput", parameter: str) -> VLLMError | None:
    """The error of a request that this has ended; None for other outputs.

    Values that are too large are the client's error. Any other is the server's, whose
    text would be lost with an exception that upstream does not know.

    Args:
        output: an output of the request.
        parameter: the field whose values are too large, for the message.

    """
    reason = reason_of_error(output)
    if reason is None:
        return None
    if not reason.startswith(MARK):
        return GracefulHTTPError(reason, HTTPStatus.INTERNAL_SERVER_ERROR)
    return NonFiniteStreamError(
        f"{parameter}: {reason}. The values are too large for this model: use "
        "smaller vectors, scales or embeddings",
        parameter=parameter,
    )


def reason_of_error(output: "RequestOutput") -> str | None:
    """The text with which a sample has ended by an error, if one has."""
    reasons = [s.stop_reason for s in output.outputs if s.finish_reason == "error"]
    return next((one for one in reasons if one and isinstance(one, str)), None)
