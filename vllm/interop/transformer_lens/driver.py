# SPDX-License-Identifier: Apache-2.0
"""The common part of the drivers on an engine and on a server."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm.interop.prompt_rows import Tap
from vllm.interop.transformer_lens.interventions import entry_of

Vectors = dict[str, dict[int, list[dict[str, Any]]]]
"""Steering entries by hook point and layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is requested of every prompt."""

    taps: tuple[Tap, ...]
    vectors: Vectors | None
    max_new_tokens: int
    logits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The results of one prompt."""

    rows: Mapping[Tap, torch.Tensor]
    """`[prompt tokens, hidden_size]` of each tap, on the CPU."""
    logits: torch.Tensor | None
    """`[prompt tokens, vocabulary]`, float32, if they were requested."""
    new_tokens: Sequence[int]
    raw: Any


class ServedDriver(ABC):
    """TransformerLens' `Driver` on an engine or a server.

    Args:
        bridge_config: TransformerLens' configuration of the model.
        architecture: the Hugging Face name of the model's class.
        tokenizer: the model's.
        names: our hook point for each of TransformerLens' names.

    """

    provides_sequence_logits = True

    def __init__(
        self,
        bridge_config: Any,
        architecture: str,
        tokenizer: Any,
        names: Mapping[str, Tap],
    ) -> None:
        self.bridge_config = bridge_config
        self.architecture = architecture
        self.tokenizer = tokenizer
        self._taps = names
        self.supported_hook_points = frozenset(names)
        self.non_fireable_hook_points: frozenset[str] = frozenset()

    @abstractmethod
    def _answers(self, prompts: list[list[int]], asked: Asked) -> list[Answer]:
        """Run each prompt of token ids; the answers have the prompts' order."""

    def forward(
        self,
        input_ids: Any = None,
        *,
        capture: tuple[str, ...] = (),
        intervene: Mapping[str, Any] | None = None,
        max_new_tokens: int = 1,
        return_logits: bool = True,
        **unknown: Any,
    ) -> Any:
        """Run one pass over each prompt, and generate `max_new_tokens`.

        Args:
            input_ids: `[prompts, tokens]` or `[tokens]`, integers.
            capture: hook points in TransformerLens' names.
            intervene: hook point -> `{"op": "suppress" | "scale" | "add" | "set",
                "factor" | "value", "pos"}`.
            max_new_tokens: number of tokens to generate, greedily.
            return_logits: whether to return logits of every prompt position, `[prompts,
                tokens, vocabulary]`, float32; costly, because the engine returns each
                position's separately.
            unknown: other arguments, refused unless they are off. Attention patterns
                have no hook point here.

        Raises:
            ValueError: an argument is unsupported; the message names it.

        """
        from transformer_lens.model_bridge.driver_protocol import ForwardResult

        unknown.pop("output_attentions", None)  # the bridge's cache always passes it
        _refuse(unknown)
        if input_ids is None:
            raise ValueError("input_ids is missing: give token ids [prompts, tokens]")
        taps = {name: self._tap(name) for name in capture}
        asked = Asked(
            taps=tuple(taps.values()),
            vectors=self._interventions(intervene or {}),
            max_new_tokens=max_new_tokens,
            logits=return_logits,
        )
        answers = self._answers(np.atleast_2d(np.asarray(input_ids)).tolist(), asked)
        logits = [answer.logits for answer in answers if answer.logits is not None]
        return ForwardResult(
            logits=torch.stack(logits) if return_logits else None,
            captured={
                name: torch.stack([answer.rows[tap] for answer in answers])
                for name, tap in taps.items()
            },
            new_tokens=torch.tensor([answer.new_tokens for answer in answers]),
            raw_output=[answer.raw for answer in answers],
        )

    def close(self) -> None:  # noqa: B027
        """Do nothing, because the engine or server belongs to the caller."""

    def supports(self, feature: str) -> bool:
        """Return false: no optional feature is supported."""
        return False

    def _tap(self, name: str) -> Tap:
        if name not in self._taps:
            raise ValueError(
                f"{name!r} is not a hook point that is served here; there are for "
                f"example {sorted(self._taps)[:3]}"
            )
        return self._taps[name]

    def _interventions(self, specs: Mapping[str, Any]) -> Vectors | None:
        vectors: Vectors = {}
        for name, spec in specs.items():
            layer, hook = self._tap(name)
            entry = entry_of(name, spec, self.bridge_config.d_model)
            vectors.setdefault(hook, {}).setdefault(layer, []).append(entry)
        return vectors or None


def _refuse(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that are neither off nor a mask that hides nothing."""
    for name, value in arguments.items():
        whole = name == "attention_mask" and np.all(np.asarray(value) == 1)
        if value is not None and value is not False and not whole:
            raise ValueError(
                f"{name}: unknown to this driver, which takes input_ids, capture, "
                "intervene, max_new_tokens and return_logits"
            )


def filled(positions: Sequence[Mapping[int, float]], vocabulary: int) -> torch.Tensor:
    """Logits `[positions, vocabulary]`, float32; -inf where a token has none."""
    logits = torch.full((len(positions), vocabulary), -torch.inf)
    for row, known in zip(logits, positions):
        row[torch.tensor(list(known))] = torch.tensor(list(known.values()))
    return logits
