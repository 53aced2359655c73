# SPDX-License-Identifier: Apache-2.0
"""An engine whose captured rows a test can inspect."""

import gc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from tests.support.hf_reference import (
    Reference,
    Stream,
    Tap,
    relative_error,
    row_errors,
)
from vllm import LLM, RequestOutput, SamplingParams
from vllm.v1.capture.consumer import CaptureConsumer
from vllm.v1.capture.selectors import parse_spec
from vllm.v1.capture.types import CaptureContext, CaptureKey, CaptureSpec

HOOKS = ("pre_attn", "post_attn", "post_block")
EVERYWHERE = dict.fromkeys(HOOKS, "all")
LOGITS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "num_gpu_blocks_override": 64,
    "enable_prefix_caching": False,
    "enable_steering": True,
    "max_logprobs": -1,
    "logprobs_mode": "raw_logits",
}
"""Options of an engine of which a test compares all logits."""


class Keeper(CaptureConsumer):
    """A ready consumer that keeps all rows, by client request, sample and tap."""

    location: Literal["worker", "driver"] = "driver"
    reads_client_spec = True
    instance_name = "keeper"

    def __init__(self, everywhere: CaptureSpec | None = None) -> None:
        self.everywhere = everywhere
        self.rows: dict[tuple[str, int], Stream] = {}
        self.sidecars: dict[tuple[str, int], dict[Tap, dict[str, Any]]] = {}

    def global_capture_spec(self) -> CaptureSpec | None:
        return self.everywhere

    def validate_client_spec(self, raw: Any, ctx: CaptureContext) -> CaptureSpec:
        return parse_spec(raw, ctx, "capture.keeper")

    def on_capture(
        self, key: CaptureKey, tensor: torch.Tensor, sidecar: dict[str, Any]
    ) -> list[str]:
        who, tap = (sidecar["client_request_id"], sidecar["sample_index"]), key[1:]
        assert tap not in self.rows.get(who, {}), "a key came twice"
        self.rows.setdefault(who, {})[tap] = tensor.clone()
        self.sidecars.setdefault(who, {})[tap] = sidecar
        return [f"{tap}: {len(tensor)}"]


class CapturedEngine:
    """An in-process engine with a `Keeper`, and the reference for its model."""

    def __init__(self, model: Path, **options: Any) -> None:
        self.keeper = options.pop("keeper", None) or Keeper()
        self.reference = options.pop("reference", None) or Reference(model)
        consumers = [self.keeper, *options.pop("capture_consumers", [])]
        chosen: dict[str, Any] = {
            "model": str(model),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 256,
            "max_num_seqs": 8,
            "block_size": 32,
            "disable_log_stats": True,
            "seed": 0,
        }
        self.llm = LLM(capture_consumers=consumers, **chosen | options)
        config = self.llm.llm_engine.vllm_config
        usual = "1" if torch.cuda.is_available() else "0"
        asked = os.environ.get("VLLM_USE_V2_MODEL_RUNNER", usual) == "1"
        assert config.use_v2_model_runner == asked, "not the runner that is tested"

    def run(self, prompts: Sequence[Sequence[int]], params: Any) -> list[RequestOutput]:
        """Generate for prompts of token ids."""
        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return self.llm.generate(given, params, use_tqdm=False)  # type: ignore[arg-type]

    def rows(self, output: RequestOutput, sample: int = 0) -> Stream:
        """The captured rows of a request."""
        return self.keeper.rows[output.request_id, sample]

    def sidecars(self, output: RequestOutput, sample: int = 0) -> dict[Tap, Any]:
        """The sidecars of a request's taps."""
        return self.keeper.sidecars[output.request_id, sample]

    def check(
        self,
        output: RequestOutput,
        positions: Sequence[int] | None = None,
        sample: int = 0,
        tolerance: float = 1e-4,
    ) -> None:
        """Check that every tap's rows equal the reference's at `positions`.

        `positions` None means all: 0 to P+N-2.
        """
        assert output.prompt_token_ids is not None
        fed = [*output.prompt_token_ids, *output.outputs[sample].token_ids][:-1]
        wanted = list(range(len(fed))) if positions is None else list(positions)
        expected, found = self.reference.stream(fed), self.rows(output, sample)
        for tap, rows in found.items():
            sidecar = self.sidecars(output, sample)[tap]
            assert sidecar["positions"] == wanted
            assert sidecar["token_ids"] == [fed[position] for position in wanted]
            assert rows.shape[0] == len(wanted)
            error = relative_error(rows, expected[tap][wanted])
            assert error <= tolerance, (tap, error, wrong(rows, expected[tap][wanted]))

    def close(self) -> None:
        """Stop the engine."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()


def wrong(found: torch.Tensor, expected: torch.Tensor) -> str:
    """The rows that deviate most, for the message of a failing test."""
    errors = row_errors(found, expected).tolist()
    worst = sorted(range(len(errors)), key=errors.__getitem__)[-5:]
    return f"of {len(errors)} rows, worst last: " + ", ".join(
        f"{row}: {errors[row]:.3g}" for row in worst
    )


def logprobs_of(output: RequestOutput, words: int) -> torch.Tensor:
    """Log-probabilities `[tokens, words]` of a request with `logprobs=-1`."""
    rows = output.outputs[0].logprobs
    assert rows is not None
    return torch.tensor([[row[n].logprob for n in range(words)] for row in rows])


def asking(
    positions: Any = "all", hooks: Any = None, max_tokens: int = 8, **options: Any
) -> SamplingParams:
    """Greedy sampling that captures at every hook point, or at `hooks`."""
    spec = {"hooks": EVERYWHERE if hooks is None else hooks, "positions": positions}
    chosen: dict[str, Any] = {
        "temperature": 0.0,
        "ignore_eos": True,
        "capture": {"keeper": spec},
    }
    return SamplingParams(max_tokens=max_tokens, **chosen | options)


def asking_logits(max_tokens: int, **options: Any) -> SamplingParams:
    """Like `asking`, with all logits of the generated tokens."""
    return asking(max_tokens=max_tokens, detokenize=False, logprobs=-1, **options)


def check_effect(
    found: torch.Tensor,
    plain: torch.Tensor,
    expected: torch.Tensor,
    least: float = 1e-3,
    tolerance: float = 2e-3,
) -> None:
    """Check that logits deviate from those without a change as much as they should."""
    effect = (expected - plain).norm()
    assert effect > least * plain.norm()
    assert (found - expected).norm() < tolerance * effect


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids without special tokens, different for each seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, 1200, (length,), generator=generator).tolist()
