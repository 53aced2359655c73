# SPDX-License-Identifier: Apache-2.0
"""Small models in bfloat16, and engines that run them inside CUDA graphs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.captured import CapturedEngine
from tests.support.hf_reference import Reference
from tests.support.models import save
from vllm.compilation.monitor import set_cudagraph_capturing_enabled

GRAPHS: dict[str, dict[str, Any]] = {
    "full": {},
    "piecewise": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "compiled": {"compilation_config": {"cudagraph_mode": "NONE"}},
    "eager": {"enforce_eager": True},
}
"""Ways in which an engine runs a step; `full`, the default: full graphs for
decoding."""

BF16 = 2e-2
"""Largest deviation of bfloat16 rows from float32 ones, relative to the row's norm."""

OpenEngine = Callable[..., CapturedEngine]


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four layers, 512 wide, in bfloat16."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=1280,
        hidden_size=512,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    return save(config, tmp_path_factory.mktemp("llama"), torch.bfloat16, scale=0.1)


@pytest.fixture(scope="module")
def open_engine() -> Iterator[OpenEngine]:
    """Open engines, one at a time: the next one closes the one before."""
    opened: list[CapturedEngine] = []

    def close() -> None:
        if opened:
            opened.pop().close()
            torch.cuda.empty_cache()
        # After its own recordings the V1 runner forbids any in this process, and the V2
        # runner does not allow them again.
        set_cudagraph_capturing_enabled(True)

    def open_one(model: Path, **options: Any) -> CapturedEngine:
        close()
        chosen: dict[str, Any] = {
            "dtype": "bfloat16",
            "enforce_eager": False,
            "max_model_len": 1024,
            "max_num_seqs": 16,
            "block_size": 32,
            "gpu_memory_utilization": 0.1,
            # Memory is not measured, so that other processes may share the GPU.
            "kv_cache_memory_bytes": 2 << 30,
            "skip_tokenizer_init": True,
            "enable_steering": True,
            "max_steering_configs": 8,
        }
        opened.append(CapturedEngine(model, **chosen | options))
        return opened[-1]

    yield open_one
    close()


@pytest.fixture(scope="session")
def reference(llama: Path) -> Reference:
    """The Transformers library's results for `llama`, in float32."""
    return Reference(llama)
