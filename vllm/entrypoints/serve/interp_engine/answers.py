# SPDX-License-Identifier: Apache-2.0
"""Answers of interp-engine's routes as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from vllm import __version__
from vllm.interop.interp_engine.model import ServedModel
from vllm.interop.interp_engine.types import GenStep, LensStep

Answer = dict[str, Any]


def description(model: ServedModel) -> Answer:
    """The model's description, and what surrounds it on a server."""
    config = model.config.model_config
    return {
        "description": asdict(model.describe()),
        "recommended_sampling": config.get_diff_sampling_param(),
        "has_chat_template": bool(model.tokenizer.chat_template),
        "engine_version": __version__,
        "manifest": {"version": 1, "digest": ""},
        "load": {
            "backend": "clearbox",
            "dtype": str(config.dtype).removeprefix("torch."),
            "quantization": config.quantization,
            "kv_cache_dtype": str(model.config.cache_config.cache_dtype),
            "num_gpus": model.config.parallel_config.world_size,
        },
        "lens": {
            "jacobian_layers": model.jacobians.get("default", []),
            "jacobian_source": None,
        },
        "limits": {
            "max_prompt_tokens": config.max_model_len - 1,
            "max_new_tokens": config.max_model_len - 1,
            "max_capture_points": None,
            "max_directions": None,
            "max_concurrency": model.config.scheduler_config.max_num_seqs,
        },
    }


def token_step(step: GenStep) -> Answer:
    """One generated token."""
    line: Answer = {"type": "token", "token_id": step.token_id}
    line["token_str"] = step.token_str
    if step.logprobs is not None:
        line["logprobs"] = step.logprobs
    return line


def lens_step(model: ServedModel, step: LensStep) -> Answer:
    """One position, with the texts of the tokens that were read."""
    lenses = []
    for ids, probabilities in zip(step.top_ids, step.top_probs):
        texts = [model.to_str_tokens(row) for row in ids]
        lenses.append(
            {
                "top_ids": ids.tolist(),
                "top_probs": probabilities.tolist(),
                "top_strs": texts,
            }
        )
    return {
        "type": "step",
        "position": step.position,
        "token_id": step.token_id,
        "token_str": model.to_str_tokens([step.token_id])[0],
        "is_generated": step.is_generated,
        "lenses": lenses,
    }


def finish_of(steps: Sequence[Answer], max_tokens: int, stop: int | None) -> str:
    """`eos`, or `length` where nothing but the limit ended it."""
    ended = bool(steps) and steps[-1]["token_id"] == stop
    return "eos" if ended or len(steps) < max_tokens else "length"
