# SPDX-License-Identifier: Apache-2.0
"""Patterns of a KV cache in 8 bits are of the keys that attention reads there."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.captured import CapturedEngine, Keeper, prompt
from tests.support.models import save
from vllm import SamplingParams
from vllm.platforms import current_platform

WIDTH, HEADS, KV_HEADS, SIZE, LAYERS = 128, 4, 2, 64, 2


def in_8_bits_on_this_cpu() -> bool:
    return torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()


pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        not torch.cuda.is_available() and not in_8_bits_on_this_cpu(),
        reason="upstream's attention reads keys in 8 bits with AVX-512 only",
    ),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CapturedEngine]:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=1280,
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=SIZE,
        max_position_embeddings=256,
    )
    model: Path = save(config, tmp_path_factory.mktemp("model"))
    opened = CapturedEngine(
        model,
        reference=object(),
        keeper=Keeper(),
        dtype="bfloat16",
        kv_cache_dtype="fp8",
        skip_tokenizer_init=True,
        max_num_batched_tokens=32,
        enable_readouts=True,
        hook_points=["q", "k"],
    )
    yield opened
    opened.close()


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """Rows in 8 bits: upstream's kernels for CPUs round them towards zero."""
    near = rows.to(current_platform.fp8_dtype())
    if torch.cuda.is_available():
        return near.float()
    too_large = near.float().abs() > rows.abs()
    bits = near.view(torch.uint8) - too_large.to(torch.uint8)
    return bits.view(near.dtype).float()


def test_patterns_are_of_the_keys_in_the_cache(engine: CapturedEngine) -> None:
    spec: dict[str, Any] = {"kind": "attention", "positions": "all", "full": True}
    params = SamplingParams(
        max_tokens=5,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        capture={"keeper": {"hooks": {"q": "all", "k": "all"}, "positions": "all"}},
        readouts={str(n): {**spec, "layers": [n]} for n in range(LAYERS)},
    )
    for output in engine.run([prompt(50, 1), prompt(9, 2)], params):
        rows = engine.rows(output)
        for layer in range(LAYERS):
            own = output.readouts[str(layer)]["weights"]
            found = torch.from_numpy(own.copy())  # [heads, n, n]
            keys = rows[layer, "k"].float().view(-1, KV_HEADS, SIZE)
            queries = rows[layer, "q"].float().view(-1, HEADS, SIZE)
            if torch.cuda.is_available():  # Attention has queries in 8 bits there.
                queries = rounded(queries)
            kept = rounded(keys).repeat_interleave(HEADS // KV_HEADS, 1)
            scores = torch.einsum("qhd,khd->hqk", queries, kept) / math.sqrt(SIZE)
            unseen = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
            expected = scores.masked_fill(unseen, -torch.inf).softmax(-1)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
            assert (kept != keys.repeat_interleave(HEADS // KV_HEADS, 1)).any()
