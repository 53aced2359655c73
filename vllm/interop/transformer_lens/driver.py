# SPDX-License-Identifier: Apache-2.0
"""The common part of the drivers on an engine and on a server."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm.interop.prompt_rows import capture_spec
from vllm.interop.transformer_lens.interventions import Intervention, parsed
from vllm.v1.residual.tap import Tap

Vectors = dict[str, dict[int, list[dict[str, Any]]]]
"""Steering entries by hook point and layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is requested of every prompt."""

    taps: tuple[Tap, ...]
    vectors: Vectors | None
    max_new_tokens: int
    logits: bool

    def fields(self) -> dict[str, Any]:
        """The fields of a request, which an engine and a server name alike."""
        logprobs = -1 if self.logits else None
        return {
            "max_tokens": self.max_new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": logprobs,
            "prompt_logprobs": logprobs,
            "capture": capture_spec(self.taps) if self.taps else None,
            "steering_vectors": self.vectors,
        }


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

    @abstractmethod
    def _generated(
        self,
        prompts: list[list[int]],
        sampling: Mapping[str, Any],
        vectors: "Vectors | None",
    ) -> list[list[int]]:
        """Generate for each prompt; the lists have the prompts' order."""

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
        prompts = _prompts_of(input_ids)
        taps = {name: self._tap(name) for name in capture}
        changes = self._interventions(intervene or {})
        asked = Asked(
            taps=tuple(taps.values()),
            vectors=_vectors_of(changes),
            max_new_tokens=max_new_tokens,
            logits=return_logits,
        )
        answers = self._answers(prompts, asked)
        logits = [answer.logits for answer in answers if answer.logits is not None]
        return ForwardResult(
            logits=torch.stack(logits) if return_logits else None,
            captured={
                name: torch.stack(
                    [_seen(answer.rows[tap], changes.get(tap)) for answer in answers]
                )
                for name, tap in taps.items()
            },
            new_tokens=torch.tensor([answer.new_tokens for answer in answers]),
            raw_output=[answer.raw for answer in answers],
        )

    def generate(
        self,
        prompts: list[list[int]],
        sampling: Mapping[str, Any],
        intervene: Mapping[str, Any] | None = None,
    ) -> list[list[int]]:
        """Token ids that are generated for each prompt.

        Args:
            prompts: token ids of each.
            sampling: fields of `SamplingParams`.
            intervene: as in `forward`; without `pos` also at generated tokens.

        Raises:
            ValueError: an intervention is invalid; the message names it.

        """
        vectors = _vectors_of(self._interventions(intervene or {}))
        return self._generated(prompts, sampling, vectors)

    def close(self) -> None:  # noqa: B027
        """Do nothing, if the engine or server belongs to the caller."""

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

    def _interventions(self, specs: Mapping[str, Any]) -> dict[Tap, Intervention]:
        changes: dict[Tap, Intervention] = {}
        for name, spec in specs.items():
            tap = self._tap(name)
            if tap in changes:
                raise ValueError(
                    f"intervene[{name!r}]: another name of the same hook point has an "
                    "intervention too; give one of them"
                )
            changes[tap] = parsed(name, spec, self.bridge_config.d_model)
        return changes


def _vectors_of(changes: Mapping[Tap, Intervention]) -> Vectors | None:
    vectors: Vectors = {}
    for (layer, hook), change in changes.items():
        vectors.setdefault(hook, {})[layer] = [change.entry()]
    return vectors or None


def _seen(rows: torch.Tensor, change: Intervention | None) -> torch.Tensor:
    """What TransformerLens captures: rows after their own intervention."""
    return rows if change is None else change.applied(rows)


def _prompts_of(input_ids: Any) -> list[list[int]]:
    """The token ids of each prompt.

    Raises:
        ValueError: there are none, or prompts of different lengths.

    """
    if input_ids is None:
        raise ValueError("input_ids is missing: give token ids [prompts, tokens]")
    try:
        ids = np.atleast_2d(np.asarray(input_ids))
    except ValueError as error:
        raise ValueError(
            "input_ids has prompts of different lengths: pass them one by one, or "
            "prompts of one length"
        ) from error
    listed: list[list[int]] = ids.tolist()
    return listed


def _refuse(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that are neither off nor a mask that hides nothing."""
    for name, value in arguments.items():
        is_mask = name == "attention_mask" and value is not None
        if is_mask and not np.all(np.asarray(value) == 1):
            raise ValueError(
                "attention_mask: prompts are run as they are, so padding would be "
                "read; pass prompts one by one, or of one length, without it"
            )
        if value is not None and value is not False and not is_mask:
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
