# SPDX-License-Identifier: Apache-2.0
"""Which requests change the stream; from the first on, new KV cache blocks are cleared.

Attention reads the last block of a sequence as a whole and gives the entries past the
end of the sequence the weight 0. Values that a former owner left there have no effect
if they are finite, but 0 times NaN or infinity is NaN, and upstream's CPU attention
carries that into the output of an unrelated request. Only vectors and embeddings sent
by clients can make the stream of a healthy model overflow.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class ChangedStreams:
    """The requests that change the stream.

    Part of the scheduler; used on the engine's thread only.
    """

    def __init__(self, clears: bool) -> None:
        """Start without requests.

        Args:
            clears: whether upstream itself clears every newly allocated block.

        """
        self.clears = clears
        """Whether newly allocated blocks must be cleared."""
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
            self.clears = True

    def begin_all(self, running: Iterable["Request"]) -> None:
        """Mark all running requests, because global vectors were set.

        They stay marked when the vectors are removed: their keys and values remain.
        """
        self._requests.update(request.request_id for request in running)
        self.clears |= self.any_running

    def concerns(self, request: "Request") -> bool:
        """Whether the request has, or has had, vectors or embeddings."""
        return request.request_id in self._requests

    def end(self, request: "Request") -> None:
        """Forget a request that frees its blocks."""
        self._requests.discard(request.request_id)


def mark(vllm_config: "VllmConfig", configs: Iterable["KVCacheConfig"]) -> None:
    """Have workers prepare to clear blocks if clients can change the stream."""
    changed = vllm_config.steering_config.enabled
    changed |= vllm_config.model_config.enable_prompt_embeds
    for config in configs:
        config.holds_changed_streams = changed
