# SPDX-License-Identifier: Apache-2.0
"""Models whose branches end in several ways, in the library and in an engine.

With a norm or a multiplier behind a branch, and in parallel, what is added to the
stream is not the output of the branch's module.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.models import SIZES, VOCABULARY, save, save_tokenizer
from vllm import LLM, SamplingParams

TOKENS = [5, 17, 99, 42, 7, 3, 250]
WIDTH, LAYERS = 64, 3
COMMON = SIZES | {"vocab_size": VOCABULARY, "num_hidden_layers": LAYERS}
CONFIGS: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "norms around branches": lambda: transformers.Gemma2Config(**COMMON),
    "norms behind branches": lambda: transformers.Olmo2Config(**COMMON),
    "a multiplier": lambda: transformers.GraniteConfig(
        **COMMON, residual_multiplier=0.22
    ),
    "parallel branches": lambda: transformers.GPTJConfig(
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=2,
        rotary_dim=16,
        n_positions=128,
    ),
}


def saved(kind: str, folder: Path) -> Any:
    """The library's model of a checkpoint that is saved in a folder."""
    save_tokenizer(save(CONFIGS[kind](), folder))
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


@contextmanager
def captured(folder: Path) -> Iterator[Callable[[Any], torch.Tensor]]:
    """What gives the rows of `TOKENS` at the hook point of a capture's `hooks`."""
    engine = LLM(
        str(folder),
        dtype="float32",
        max_model_len=64,
        enforce_eager=True,
        gpu_memory_utilization=0.2,
        capture_consumers=["inline"],
        hook_points=["attn_add", "mlp_add"],
    )

    def rows(hooks: Any) -> torch.Tensor:
        spec = {"hooks": hooks, "positions": "all_prompt"}
        params = SamplingParams(max_tokens=1, capture={"inline": spec})
        out = engine.generate({"prompt_token_ids": TOKENS}, params, use_tqdm=False)[0]
        (found,) = out.capture_results["inline"].payload.values()
        return found

    yield rows
    engine.llm_engine.engine_core.shutdown()
