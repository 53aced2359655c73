# SPDX-License-Identifier: Apache-2.0
"""Device memory whose content is kept while the engine sleeps, at every level.

A model is loaded in a memory pool that `sleep(level=2)` discards, because its weights
can be loaded again. Tables of vectors, row indices, slot maps, staging memory and the
weights of SAEs and probes cannot be recreated, and CUDA graphs hold their addresses.
They are allocated in upstream's pool "runtime", which is copied to the host at each
level and restored to the same addresses by any `wake_up`.
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
    """A context whose device allocations are kept while the engine sleeps."""
    if current_platform.is_cuda_alike() and model_config.enable_cumem_allocator:
        return get_mem_allocator_instance().use_memory_pool(tag=KEPT_TAG)
    return nullcontext()


def is_on_the_host(sleeping_tags: Collection[str]) -> bool:
    """Whether kept memory is offloaded, so that it must not be written.

    Args:
        sleeping_tags: the executor's tags of sleeping memory. The first `wake_up` after
            a sleep restores the memory, whichever tags it wakes.

    """
    return all(tag in sleeping_tags for tag in DEFERRABLE_TAGS)
