# SPDX-License-Identifier: Apache-2.0
"""Blocks of the KV cache in which a request may have left numbers that are not finite.

Attention reads a sequence's last block as a whole and gives the rows behind the
sequence's end the weight 0. What a former owner left there has no effect as long as it
is finite, but 0 times NaN or infinity is NaN: upstream's CPU attention carries it into
the output of a request that has nothing to do with it. Only vectors and embeddings that
clients send can make a healthy model's stream overflow. A block that was allocated
while such a request ran is therefore cleared before it belongs to another one.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class SuspectBlocks:
    """Which requests change the stream, and which blocks they may have written.

    Part of the scheduler; engine thread only.
    """

    def __init__(self, clears_all: bool) -> None:
        """Begin; `clears_all`: upstream itself clears every new block."""
        self._clears_all = clears_all
        self._blocks: set[int] = set()
        self._requests: set[str] = set()

    @property
    def any_running(self) -> bool:
        """Whether a request runs that is given vectors or embeddings."""
        return bool(self._requests)

    def begin(self, request: "Request", for_all: bool) -> None:
        """A waiting request is scheduled; `for_all`: global vectors are set."""
        params = request.sampling_params
        steered = params is not None and params._steering is not None
        if for_all or steered or request.prompt_embeds is not None:
            self._requests.add(request.request_id)

    def begin_all(self, running: Iterable["Request"]) -> None:
        """Global vectors change the streams of all that run.

        They stay suspect when the vectors are cleared: keys and values remain.
        """
        self._requests.update(request.request_id for request in running)

    def concerns(self, request: "Request") -> bool:
        """Whether the request is given vectors or embeddings."""
        return request.request_id in self._requests

    def end(self, request: "Request", block_ids: Iterable[Iterable[int]]) -> None:
        """A request gives its blocks back, by group of layers."""
        if request.request_id in self._requests:
            self._requests.discard(request.request_id)
            self._blocks.update(*block_ids)

    def to_clear(self, new: list[int]) -> list[int]:
        """Those of the blocks that were allocated in this step that must be cleared."""
        found = new
        if not self._clears_all:
            found = [block for block in new if block in self._blocks]
        if self._requests:
            self._blocks.update(new)
        else:
            self._blocks.difference_update(found)
        return found


def mark(vllm_config: "VllmConfig", configs: Iterable["KVCacheConfig"]) -> None:
    """Have workers prepare for clearing blocks where clients can change the stream."""
    changed = vllm_config.steering_config.enabled
    changed |= vllm_config.model_config.enable_prompt_embeds
    for config in configs:
        config.holds_changed_streams = changed
