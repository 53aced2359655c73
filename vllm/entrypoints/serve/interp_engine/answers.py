# SPDX-License-Identifier: Apache-2.0
"""Answers of interp-engine's routes as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from vllm import __version__
from vllm.entrypoints.serve.interp_engine.room import MOST_DIRECTIONS
from vllm.entrypoints.serve.interp_engine.schema import MOST_POINTS, Tokenize
from vllm.interop.interp_engine.model import ServedModel
from vllm.interop.interp_engine.types import GenStep, LensStep

Answer = dict[str, Any]

MANIFEST = {"version": 1, "digest": "f25bc48efa531b9a"}
"""Which `api/engine.yaml` of interp-engine the routes follow: that of 1.14."""

LEAST_CHARACTERS, CHARACTERS_PER_TOKEN = 1 << 16, 16
"""What is tokenized at a time: so much, or so much per token of the longest prompt."""


def description(model: ServedModel) -> Answer:
    """The model's description, and what surrounds it on a server."""
    config = model.config.model_config
    return {
        "description": asdict(model.describe()),
        "recommended_sampling": asdict(model.recommended_sampling),
        "has_chat_template": bool(model.tokenizer.chat_template),
        "engine_version": __version__,
        "manifest": MANIFEST,
        "load": {
            "backend": "clearbox",
            "dtype": str(config.dtype).removeprefix("torch."),
            "quantization": config.quantization or "",
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
            "max_capture_points": MOST_POINTS,
            "max_directions": MOST_DIRECTIONS // model.d_model,
            "max_concurrency": model.config.scheduler_config.max_num_seqs,
        },
    }


def tokenized(model: ServedModel, body: Tokenize) -> Answer:
    """Token ids, and each token's text.

    Raises:
        ValueError: the text is much longer than a prompt, or the template refuses it.

    """
    size = len(json.dumps(body.messages)) if body.text is None else len(body.text)
    most = max(
        LEAST_CHARACTERS, CHARACTERS_PER_TOKEN * model.config.model_config.max_model_len
    )
    if size > most:
        raise ValueError(f"{size} characters; at most {most} are tokenized at a time")
    ids = _ids(model, body)
    return {"token_ids": ids, "str_tokens": model.to_str_tokens(ids), "spans": None}


def _ids(model: ServedModel, body: Tokenize) -> list[int]:
    if body.text is not None:
        ids: list[int] = model.to_tokens(body.text, body.prepend_bos)[0].tolist()
        return ids
    try:
        ids = model.tokenizer.apply_chat_template(
            body.messages,
            tokenize=True,
            return_dict=False,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            **body.template_kwargs,
        )
    except Exception as error:  # A template raises whatever it likes.
        raise ValueError(
            f"messages: the chat template refuses them: {error}"
        ) from error
    return ids


def token_step(step: GenStep) -> Answer:
    """One generated token."""
    line = {"type": "token", "token_id": step.token_id, "token_str": step.token_str}
    return line if step.logprobs is None else {**line, "logprobs": step.logprobs}


def lens_step(model: ServedModel, step: LensStep) -> Answer:
    """One position, with the texts of the tokens that were read."""
    return {
        "type": "step",
        "position": step.position,
        "token_id": step.token_id,
        "token_str": model.to_str_tokens([step.token_id])[0],
        "is_generated": step.is_generated,
        "lenses": [
            {
                "top_ids": ids.tolist(),
                "top_probs": probabilities.tolist(),
                "top_strs": [model.to_str_tokens(row) for row in ids],
            }
            for ids, probabilities in zip(step.top_ids, step.top_probs)
        ],
    }


def finish_of(steps: Sequence[Answer], max_tokens: int, stop: int | None) -> str:
    """`eos`, or `length` where nothing but the limit ended it."""
    ended = bool(steps) and steps[-1]["token_id"] == stop
    return "eos" if ended or len(steps) < max_tokens else "length"
