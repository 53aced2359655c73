# SPDX-License-Identifier: Apache-2.0
"""Rows of vllm-activation-capture's modes are encoded on the GPU.

The files hold what the host would have encoded, and only encoded rows are copied.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.captured import CapturedEngine, prompt
from tests.support.hf_reference import Stream
from vllm import LLM, SamplingParams
from vllm.interop.activation_capture.encoding import Encoding, dequantize, restore

pytestmark = pytest.mark.gpu

WIDTH, K = 512, 64
PROMPTS = [prompt(100, seed=9), prompt(40, seed=10), prompt(700, seed=11)]
PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False)
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "block_size": 32,
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 1 << 30,
    "skip_tokenizer_init": True,
}
ENCODED = [
    ("rp8", "1", K * 4),
    ("rp8", "0", K + 8),
    ("topk8", "1", K * 3 + 8),
    ("full8", "0", WIDTH + 8),
    ("full8", "1", WIDTH * 2),
]
"""Mode, `VLLM_ACT_PER_DIM`, and the bytes of a row that are copied."""


@pytest.fixture(scope="module")
def rows(llama: Path) -> list[Stream]:
    """The rows of each prompt, captured whole."""
    own = SamplingParams(
        max_tokens=12,
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        capture={"keeper": {"hooks": {"post_block": "all"}, "positions": "all"}},
    )
    engine = CapturedEngine(llama, reference=object(), **OPTIONS)
    try:
        return [engine.rows(output) for output in engine.run(PROMPTS, own)]
    finally:
        engine.close()
        torch.cuda.empty_cache()


def host_row_bytes(worker: Any) -> int:
    staging = worker.model_runner.residual._capture._staging
    return int(staging.host_rows[:1].nbytes)


@pytest.mark.parametrize(("mode", "per_dim", "row_bytes"), ENCODED)
def test_only_encoded_rows_leave_the_gpu(
    mode: str,
    per_dim: str,
    row_bytes: int,
    llama: Path,
    rows: list[Stream],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variables = {
        "CAPTURE": "1",
        "MODE": mode,
        "PER_DIM": per_dim,
        "RP_K": str(K),
        "TOPK_K": str(K),
        "OUTDIR": str(tmp_path),
    }
    for name, value in variables.items():
        monkeypatch.setenv(f"VLLM_ACT_{name}", value)
    llm = LLM(str(llama), **OPTIONS)
    try:
        assert llm.collective_rpc(host_row_bytes) == [row_bytes]
        given: Any = [{"prompt_token_ids": tokens} for tokens in PROMPTS]
        outputs = llm.generate(given, PARAMS, use_tqdm=False)
    finally:
        llm.llm_engine.engine_core.shutdown()
        torch.cuda.empty_cache()
    encoding = Encoding(mode=mode, rp_k=K, topk_k=K, per_dim_scale=per_dim == "1")
    for output, stream in zip(outputs, rows, strict=True):
        manifest = output.capture_results["activation_capture"].payload
        folder = Path(manifest["output_dir"])
        for (layer, _), expected in stream.items():
            path = folder / f"seq0_layer{layer}_rank0.npz"
            with np.load(path) as file:
                check(dict(file), encoding, expected)


def check(found: dict[str, np.ndarray], encoding: Encoding, rows: torch.Tensor) -> None:
    """The arrays are those of `rows`, within the rounding of a product."""
    values = rows.float().numpy()
    if encoding.mode == "topk8":  # of equal magnitudes, any may be kept
        kept = np.take_along_axis(values, found["indices"].astype(int), axis=1)
        assert np.all(np.abs(dequantize(found) - kept) <= found["scale"] * 0.501)
        least = np.sort(np.abs(values), axis=1)[:, -K]
        np.testing.assert_array_equal(np.abs(kept).min(axis=1), least)
        return
    expected = encoding.encode(rows)
    apart = np.abs(found["q"].astype(int) - expected["q"].astype(int))
    assert apart.max() <= (1 if encoding.mode == "rp8" else 0)
    np.testing.assert_allclose(found["scale"], expected["scale"], rtol=1e-4)
    back, right = (restore(one, WIDTH, 12345) for one in (found, expected))
    assert np.abs(back - right).max() <= 2 * np.abs(found["scale"]).max() * K**0.5
