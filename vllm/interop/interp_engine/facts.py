# SPDX-License-Identifier: Apache-2.0
"""Facts about a served model, which need no forward pass."""

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from vllm.config import VllmConfig
from vllm.interop.interp_engine.types import (
    NAMES,
    EngineDescription,
    RecommendedSampling,
    SamplingSettings,
    tap_of,
)
from vllm.v1.residual.sizes import num_layers


class ModelFacts:
    """Properties of a model, its tokenizer, and its hook points.

    Args:
        config: the engine's configuration.
        tokenizer: a Hugging Face tokenizer.

    """

    def __init__(self, config: VllmConfig, tokenizer: Any) -> None:
        self.config = config
        self.tokenizer = tokenizer
        model = config.model_config
        self.hf_model_id = str(model.model)
        """The model's name or path."""
        self.n_layers = num_layers(model)
        """Number of decoder layers."""
        self.d_model = int(model.get_hidden_size())
        """Width of the residual stream."""
        self.n_heads = int(model.model_arch_config.total_num_attention_heads)
        """Number of query heads of the whole model."""
        self.n_kv_heads = int(model.get_total_num_kv_heads())
        """Number of key and value heads of the whole model."""
        self.head_dim = int(model.get_head_size())
        """Width of a head."""
        self.default_prepend_bos = tokenizer.bos_token_id is not None
        """Whether `to_tokens` begins with BOS by default."""

    @property
    def tokenizer_prepends_bos(self) -> bool:
        """Whether the tokenizer itself prepends BOS."""
        ids = self.tokenizer("a")["input_ids"]
        return bool(ids) and ids[0] == self.tokenizer.bos_token_id

    def to_tokens(self, text: str, prepend_bos: bool | None = None) -> torch.Tensor:
        """Token ids `[1, tokens]`, int64."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        wanted = self.default_prepend_bos if prepend_bos is None else prepend_bos
        if wanted and self.tokenizer.bos_token_id is not None:
            ids = [self.tokenizer.bos_token_id, *ids]
        return torch.tensor([ids], dtype=torch.int64)

    def to_str_tokens(self, tokens: Any) -> list[str]:
        """The text of each token."""
        ids = torch.as_tensor(tokens).flatten().tolist()
        return [self.tokenizer.decode([one]) for one in ids]

    def describe(self) -> EngineDescription:
        """What can be served, determined without a forward pass."""
        points = self.config.capture_config.hook_points or {}
        names = sorted(
            {NAMES.get(name, name) for own in points.values() for name in own}
        )
        return EngineDescription(
            backend="clearbox",
            hf_model_id=self.hf_model_id,
            n_layers=self.n_layers,
            d_model=self.d_model,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            hooks_available=True,
            graph_replay=False,
            static_points=[],
            static_writes=[],
            capture_points=names,
            residual_readable="resid_post" in names,
            attention=False,
        )

    def refuses(self, point: Any, layer: int | None = None) -> str | None:
        """The reason why a point cannot be read; None if it can."""
        try:
            at, hook = tap_of(point, layer)
        except ValueError as error:
            return str(error)
        points = self.config.capture_config.hook_points or {}
        if at not in points:
            return f"the model has the layers 0 to {self.n_layers - 1}, not {at}"
        if hook not in points[at]:
            return f"layer {at} has {sorted(points[at])}, not {hook}"
        return None

    def serves(self, point: Any, layer: int | None = None) -> bool:
        """Whether a point can be read."""
        return self.refuses(point, layer) is None

    def sampling_settings(
        self,
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        presence_penalty: float | None = None,
    ) -> SamplingSettings:
        """Each setting as given, else as the checkpoint recommends, else neutral."""
        stated = self.recommended_sampling
        k = stated.top_k if top_k is None else top_k
        p = stated.top_p if top_p is None else top_p
        heat = 0.0 if stated.do_sample is False else stated.temperature
        if temperature is not None:
            heat = temperature
        return SamplingSettings(
            temperature=1.0 if heat is None else float(heat),
            top_k=None if k is None or int(k) < 1 else int(k),
            top_p=None if p is None or float(p) >= 1.0 else float(p),
            presence_penalty=float(presence_penalty or 0.0),
        )

    @cached_property
    def recommended_sampling(self) -> RecommendedSampling:
        """What `--generation-config` states, by default the checkpoint's file."""
        config = self.config.model_config
        given = config.generation_config
        stated = {} if given == "vllm" else config.try_get_generation_config()
        stated |= config.override_generation_config
        k, p = stated.get("top_k"), stated.get("top_p")
        penalty = stated.get("repetition_penalty")
        found = RecommendedSampling(
            temperature=stated.get("temperature"),
            top_k=k if k is not None and k > 0 else None,
            top_p=p if p is not None and p < 1.0 else None,
            repetition_penalty=None if penalty == 1.0 else penalty,
            do_sample=stated.get("do_sample"),
        )
        if found == RecommendedSampling():
            return found
        return replace(found, source=self.hf_model_id if given == "auto" else given)

    @cached_property
    def tok(self) -> Any:
        """interp-engine's `Tokenize`, which its server uses; needs its package."""
        from interp_engine.tokenize import Tokenize

        return Tokenize(self.tokenizer, default_prepend_bos=self.default_prepend_bos)
