# SPDX-License-Identifier: Apache-2.0
"""Device memory whose content an engine that sleeps keeps, at every level.

A model is loaded within a pool that `sleep(level=2)` discards, as its weights can be
loaded again. Tables of vectors, row indices, slot maps, staging memory and the weights
of SAEs and probes cannot: nobody else has them, and recorded graphs hold their
addresses. Upstream's pool "runtime" is copied to the host at each level, and back with
any `wake_up`, to the same addresses.
"""

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from vllm.device_allocator import DEFERRABLE_TAGS, get_mem_allocator_instance
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.config import ModelConfig

KEPT_TAG = "runtime"


def kept_memory(model_config: "ModelConfig") -> AbstractContextManager[None]:
    """Where what is allocated on the device outlives the sleep of the engine."""
    if current_platform.is_cuda_alike() and model_config.enable_cumem_allocator:
        return get_mem_allocator_instance().use_memory_pool(tag=KEPT_TAG)
    return nullcontext()


def is_on_the_host(sleeping_tags: Collection[str]) -> bool:
    """Whether the content is away, so that nothing may be written.

    Args:
        sleeping_tags: of an executor. Its first `wake_up` since it fell asleep brings
            the content back, whatever it wakes.

    """
    return all(tag in sleeping_tags for tag in DEFERRABLE_TAGS)
