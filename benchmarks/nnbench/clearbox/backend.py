# SPDX-License-Identifier: Apache-2.0
"""Clearbox as a backend of nnbench: the engine, as its shared worker drives it.

Copy the folder `clearbox` to `backends/` of a checkout of nnbench, whose package is
`isb`.
"""

from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from isb.backends.base import Backend
from isb.jobs.worker import merge_requirements, options
from isb.runs import EngineConfig, RunConfig

ENGINE = {
    "capture_consumers": ["inline"],
    "enable_readouts": True,
    "enable_steering": True,
    "hook_points": ["mlp_out", "attn_out"],
}
"""What the cells need; nothing is switched off: graphs and compiled code stay."""


@dataclass
class ServedModel:
    """An engine, and what the worker asks of a model."""

    llm: Any
    tokenizer: Any
    config: Any
    n_layers: int
    directions: dict[int, Any] = field(default_factory=dict)
    """Token id -> unit row of the unembedding, asked for once."""


class ClearboxBackend(Backend):
    """Loads the model once; every cell is one request or two."""

    name = "clearbox"

    def __init__(self, **engine_options: Any) -> None:
        self.engine_options = engine_options

    def load(self, repo: str) -> ServedModel:
        """Start an engine."""
        from transformers import AutoConfig

        from vllm import LLM

        llm = LLM(model=repo, **{**ENGINE, **self.engine_options})
        config = AutoConfig.from_pretrained(repo)
        return ServedModel(llm, llm.get_tokenizer(), config, config.num_hidden_layers)

    def vanilla(self, model: ServedModel, prompt: str, *, new_tokens: int) -> None:
        """Generate without capture and steering, on the same engine."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=new_tokens, temperature=0.0)
        model.llm.generate([prompt], params, use_tqdm=False)

    def teardown(self, model: ServedModel) -> None:
        """Stop the engine."""
        model.llm.llm_engine.engine_core.shutdown()


def create_backend(spec: Any, cls: Any = None, mode: str = "clearbox") -> Any:
    """What nnbench's worker calls: the backend, and how the run is described."""
    params = merge_requirements(spec.vllm_kwargs, options())
    version = metadata.version("vllm")
    engine = EngineConfig("vllm", mode=mode, params={**params, "clearbox": version})
    return (cls or ClearboxBackend)(**params), RunConfig(engine)
