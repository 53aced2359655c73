# SPDX-License-Identifier: Apache-2.0
"""Clears KV cache blocks that may contain NaN or infinity before they are reused.

Attention reads the last block of a sequence as a whole and gives the entries past the
end of the sequence the weight 0. Values that a former owner left there have no effect
if they are finite, but 0 times NaN or infinity is NaN, and upstream's CPU attention
carries that into the output of an unrelated request. Only vectors and embeddings sent
by clients can make the stream of a healthy model overflow. A block that was allocated
while such a request was running is therefore cleared before another request gets it.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class SuspectBlocks:
    """The requests that change the stream, and the blocks that they may have written.

    Part of the scheduler; used on the engine's thread only.
    """

    def __init__(self, clears_all: bool) -> None:
        """Start without requests.

        Args:
            clears_all: whether upstream itself clears every newly allocated block.

        """
        self._clears_all = clears_all
        self._blocks: set[int] = set()
        self._requests: set[str] = set()

    @property
    def any_running(self) -> bool:
        """Whether a request with vectors or embeddings is running."""
        return bool(self._requests)

    def begin(self, request: "Request", for_all: bool) -> None:
        """Note a request that starts to run; `for_all`: global vectors are set."""
        params = request.sampling_params
        steered = params is not None and (
            params._steering is not None or params._hooks is not None
        )
        if for_all or steered or request.prompt_embeds is not None:
            self._requests.add(request.request_id)

    def begin_all(self, running: Iterable["Request"]) -> None:
        """Mark all running requests, because global vectors were set.

        They stay marked when the vectors are removed: their keys and values remain.
        """
        self._requests.update(request.request_id for request in running)

    def concerns(self, request: "Request") -> bool:
        """Whether the request has, or has had, vectors or embeddings."""
        return request.request_id in self._requests

    def end(self, request: "Request", block_ids: Iterable[Iterable[int]]) -> None:
        """Mark the blocks, by group of layers, of a request that frees them."""
        if request.request_id in self._requests:
            self._requests.discard(request.request_id)
            self._blocks.update(*block_ids)

    def to_clear(self, new: list[int]) -> list[int]:
        """Which of the blocks allocated in this step must be cleared."""
        found = new
        if not self._clears_all:
            found = [block for block in new if block in self._blocks]
        if self._requests:
            self._blocks.update(new)
        else:
            self._blocks.difference_update(found)
        return found


def mark(vllm_config: "VllmConfig", configs: Iterable["KVCacheConfig"]) -> None:
    """Have workers prepare to clear blocks if clients can change the stream."""
    changed = vllm_config.steering_config.enabled
    changed |= vllm_config.model_config.enable_prompt_embeds
    for config in configs:
        config.holds_changed_streams = changed
