# SPDX-License-Identifier: Apache-2.0
"""Capture inside CUDA graphs together with other features of upstream."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.gpu.conftest import BF16, OpenEngine
from tests.support.adapters import adapter
from tests.support.captured import CapturedEngine, asking, prompt
from tests.support.hf_reference import Reference
from tests.support.models import save
from vllm import RequestOutput
from vllm.lora.request import LoRARequest

pytestmark = pytest.mark.gpu

QUIET: dict[str, Any] = {"detokenize": False}


def check_all(engine: CapturedEngine, prompts: list[list[int]], **options: Any) -> None:
    """Check that every row of these requests equals the reference's."""
    params = asking("all", max_tokens=20, **QUIET)
    for output in engine.run(prompts, params):
        engine.check(output, tolerance=options.get("tolerance", BF16))
        rows = engine.rows(output)
        for layer, hook in rows:
            if hook == "post_block" and (layer + 1, "pre_attn") in rows:
                following = rows[layer + 1, "pre_attn"]
                assert rows[layer, hook].equal(following), (layer, hook)


def test_preempted_requests_have_each_row_once(
    llama: Path, reference: Reference, open_engine: OpenEngine
) -> None:
    engine = open_engine(
        llama, reference=reference, num_gpu_blocks_override=8, max_model_len=128
    )
    core: Any = engine.llm.llm_engine.engine_core
    scheduler = core.engine_core.scheduler
    scheduler._preempt_request = preempt = Mock(wraps=scheduler._preempt_request)
    prompts = [prompt(60, seed=20 + i) for i in range(3)]
    outputs = engine.run(prompts, asking("all", max_tokens=40, **QUIET))
    assert preempt.called, "the test is pointless without a preemption"
    for output in outputs:
        engine.check(output, range(99), tolerance=BF16)


def test_rows_of_cached_blocks_come_from_the_activation_store(
    llama: Path, reference: Reference, open_engine: OpenEngine
) -> None:
    engine = open_engine(llama, reference=reference, activation_store_gb=0.2)
    prompts = [prompt(700 + 10 * i, seed=60 + i) for i in range(6)]
    params = asking("all", max_tokens=8, **QUIET)
    first, second = (engine.run(prompts, params) for _ in range(2))
    for one, again in zip(first, second, strict=True):
        engine.check(again, tolerance=BF16)
        cached, whole = again.num_cached_tokens, engine.rows(one)
        assert cached is not None and cached >= 640
        for tap, rows in engine.rows(again).items():
            assert rows[:cached].equal(whole[tap][:cached]), tap


def test_rejected_drafts_leave_no_row(
    llama: Path, reference: Reference, open_engine: OpenEngine
) -> None:
    engine = open_engine(
        llama,
        reference=reference,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 2,
            "prompt_lookup_min": 1,
        },
    )
    # Prompts that repeat themselves, so that drafts are proposed.
    check_all(engine, [prompt(6, seed=40 + i) * 5 for i in range(4)])


def test_rows_of_a_model_with_fp8_weights(
    llama: Path, reference: Reference, open_engine: OpenEngine
) -> None:
    engine = open_engine(llama, reference=reference, quantization="fp8")
    # Weights have eight bits, three of them mantissa: some percent per product.
    check_all(engine, [prompt(30 + i, seed=50 + i) for i in range(4)], tolerance=0.15)


def test_rows_of_requests_with_and_without_an_adapter(
    tmp_path: Path, llama: Path, reference: Reference, open_engine: OpenEngine
) -> None:
    # Small, so that rounding the adapter's products to bfloat16 stays small too.
    adapted = adapter(llama, tmp_path, scale=0.05)
    engine = open_engine(llama, reference=reference, enable_lora=True, max_lora_rank=8)
    request = LoRARequest("adapter", 1, str(tmp_path))
    outputs = engine.llm.generate(
        [{"prompt_token_ids": prompt(30 + i, seed=90 + i)} for i in range(4)],
        asking("all", max_tokens=20, **QUIET),
        lora_request=[request, None, request, None],
        use_tqdm=False,
    )
    for output, expected in zip(outputs, (adapted, reference) * 2):
        engine.reference = expected
        engine.check(output, tolerance=BF16)


def test_rows_of_a_model_with_latent_attention(
    tmp_path: Path, open_engine: OpenEngine
) -> None:
    """All later layers share the second layer's code; the first layer differs."""
    from transformers import DeepseekV2Config

    config = DeepseekV2Config(
        vocab_size=1280,
        hidden_size=512,
        intermediate_size=768,
        moe_intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=16,
        first_k_dense_replace=1,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=4,  # All: bfloat16 cannot turn the router's choice.
        n_group=1,
        topk_group=1,
        q_lora_rank=None,
        # The sizes that Hopper's kernels support.
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    model = save(config, tmp_path, torch.bfloat16, scale=0.1)
    engine = open_engine(model)
    check_all(engine, [prompt(20 + i, seed=70 + i) for i in range(4)])


def check_readouts(
    engine: CapturedEngine, prompts: list[list[int]], reference: Reference
) -> None:
    """Check that the readouts of all layers are those of the captured rows."""
    model: Any = reference.model
    unembedding = model.lm_head.weight.detach().bfloat16().float()
    everywhere = {"hooks": {"post_block": "all"}, "positions": "all"}
    readouts = {
        "rows": {"kind": "rows", **everywhere},
        "norms": {"kind": "norm", **everywhere},
        "lens": {"kind": "lens", "top_k": 2},
    }
    params = asking("all", max_tokens=30, readouts=readouts, **QUIET)
    for output in engine.run(prompts, params):
        rows, found = engine.rows(output), output.readouts
        taps = [(layer, "post_block") for layer in range(4)]
        stream = torch.stack([rows[tap] for tap in taps], dim=1).float()
        assert not [one.error for one in found.values() if one.error]
        assert torch.from_numpy(found["rows"]["rows"]).equal(stream)
        norms = torch.from_numpy(found["norms"]["norm"])
        torch.testing.assert_close(norms, stream.norm(dim=-1))
        with torch.no_grad():
            normed = model.model.norm(stream).bfloat16().float()
        chosen = torch.from_numpy(found["lens"]["token_ids"]).long()
        logits = (normed[-len(chosen) :] @ unembedding.T).log_softmax(-1)
        own = torch.from_numpy(found["lens"]["logprobs"])
        torch.testing.assert_close(logits.gather(-1, chosen), own, atol=0.05, rtol=0.02)
        torch.testing.assert_close(logits.topk(2).values, own, atol=0.05, rtol=0.02)
        # At the last layer it is the model's own choice, except where two are a tie.
        following = torch.tensor(output.outputs[0].token_ids[1:])
        assert (chosen[:, -1, 0] == following).float().mean() > 0.8


def test_rows_around_tokens_that_fire(
    llama: Path, reference: Reference, open_engine: OpenEngine
) -> None:
    """They wait on the device, in graphs, until it is known which are kept."""
    engine = open_engine(llama, reference=reference, enable_readouts=True)
    norm = {"kind": "norm", "hooks": {"post_block": [3]}, "positions": "all"}
    prompts = [prompt(5 + 23 * i, seed=100 + i) for i in range(24)]
    lengths = [3 + 4 * i for i in range(24)]

    def run(**keep: Any) -> tuple[list[RequestOutput], list[list[float]]]:
        params = [
            asking("all", max_tokens=length, readouts={"size": norm}, **QUIET)
            for length in lengths
        ]
        for one in params if keep else ():
            one.capture["keeper"] |= {"keep_when": {"readout": "size", **keep}}
        outputs = engine.run(prompts, params)
        return outputs, [one.readouts["size"]["norm"][:, 0] for one in outputs]

    _, norms = run()
    above = float(
        torch.tensor([float(x) for one in norms for x in one]).quantile(0.999)
    )
    outputs, norms = run(above=above, scope="token", before=2, after=3)
    counts = []
    for output, values in zip(outputs, norms):
        near = {
            number + offset
            for number, value in enumerate(values)
            for offset in range(-2, 4)
            if value > above
        }
        kept = sorted(near & set(range(len(values))))
        counts.append(len(kept))
        assert output.capture_results["keeper"].kept == len(kept) * 12
        if kept:
            engine.check(output, kept, tolerance=BF16)
    assert 0 in counts and any(counts), counts
    check_readouts(engine, prompts[:4], reference)


@pytest.mark.parametrize(
    "tensor, pipeline", [(2, 1), (1, 2), (2, 2)], ids=["tensor", "pipeline", "both"]
)
def test_rows_from_several_gpus(
    llama: Path,
    reference: Reference,
    open_engine: OpenEngine,
    tensor: int,
    pipeline: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if torch.cuda.device_count() < tensor * pipeline:
        pytest.skip(f"this machine has fewer than {tensor * pipeline} GPUs")
    # A forked worker cannot use CUDA after this process has initialized it.
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    engine = open_engine(
        llama,
        reference=reference,
        distributed_executor_backend="mp",
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        enable_readouts=True,
    )
    prompts = [prompt(20 + 9 * i, seed=80 + i) for i in range(4)]
    check_all(engine, prompts)
    check_readouts(engine, prompts, reference)
