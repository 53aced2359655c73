# SPDX-License-Identifier: Apache-2.0
"""Heads and embeddings on a CPU after weights were reloaded in place.

On a CPU each of them keeps a packed copy of its weights. Upstream packs again what it
has loaded: a head that is tied to the embedding shares its weights, is not loaded
itself, and would go on with the packed copy of the earlier weights.
"""

from torch import nn

from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform


def pack_again(model: nn.Module) -> None:
    """Pack the weights of heads and embeddings; does nothing but on a CPU."""
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
