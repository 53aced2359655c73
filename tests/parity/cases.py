# SPDX-License-Identifier: Apache-2.0
"""A tiny random model of one architecture in one configuration."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.parity.inside import DIFFERING
from tests.parity.needs import Need
from tests.parity.recipe import PLAIN, Recipe
from tests.parity.substitutes import Substitute
from tests.parity.twins import Twin
from tests.support.models import SIZES, randomise

VOCABULARY = 256
GENTLE = 0.085
"""A scale of weights that suits bfloat16: with larger ones the library's own rows in
bfloat16 deviate so much from float32 that wrong rows cannot be detected."""

TOKENS = {
    "vocab_size": VOCABULARY,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def common(**options: Any) -> dict[str, Any]:
    """The options that most configurations share, updated by `options`."""
    return SIZES | {"num_hidden_layers": 3, "tie_word_embeddings": False} | options


def _tokens(ids: list[int]) -> Mapping[str, Any]:
    return {"prompt_token_ids": ids}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """One comparison: a configuration of an architecture."""

    architecture: str
    """Its name in upstream's registry."""
    model_type: str
    """Its name in the library."""
    options: Mapping[str, Any]
    variant: str = "plain"
    dtype: str = "float32"
    recipe: Recipe = PLAIN
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the engine."""
    on_cpu: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the engine on a CPU."""
    on_cuda: Mapping[str, Any] = field(default_factory=dict)
    """Options of the model on a GPU, where upstream's kernels support bfloat16 only."""
    twin: Twin | None = None
    """Set if the library has the architecture under another name only."""
    scale: float = 0.2
    """Scale of the random weights."""
    seed: int = 0
    zeros: tuple[str, ...] = ()
    """Weights that are set to zero, by parts of their names, because upstream ignores
    them."""
    representative: bool = False
    """Whether it is part of `make test`."""
    substitute: Substitute | None = None
    """Set if upstream computes a function of the library differently."""
    note: str = ""
    """A note on the comparison."""
    cannot: str = ""
    """The reason why upstream cannot run it on a CPU."""
    needs: tuple[Need, ...] = ()
    """Libraries without which upstream cannot run it on a GPU."""
    never: str = ""
    """The reason why it cannot be compared on any device."""
    loader: str = "AutoModelForCausalLM"
    """The library's class that creates and loads the model."""
    prompt: Callable[[list[int]], Mapping[str, Any]] = _tokens
    """The engine's prompt with these tokens."""
    processor: Callable[[Path], None] | None = None
    """Saves what upstream processes pictures or audio with, in the model's folder."""
    stand_ins: tuple[str, ...] = ()
    """Libraries that upstream's file imports without using them for this model."""

    @property
    def differing(self) -> Mapping[str, str]:
        """Points inside the block that the library computes otherwise, and how."""
        own = DIFFERING.get(f"{self.architecture} {self.variant}", {})
        return {**DIFFERING.get(self.architecture, {}), **own}

    @property
    def name(self) -> str:
        return f"{self.architecture}-{self.variant}-{self.dtype}"

    @property
    def notes(self) -> list[str]:
        """Notes on how the comparison differs from a plain one."""
        notes = [self.substitute.why if self.substitute else "", self.note]
        if self.stand_ins:
            notes.append(
                f"where {self.stand_ins[0]} is not installed, empty classes stand in"
                " for what its file imports"
            )
        return [note for note in notes if note]

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def obstacle(self, device: str) -> str | None:
        """The reason why upstream itself cannot run it on a device."""
        if self.never:
            return self.never
        if device == "cpu":
            return self.cannot or None
        return next((need.reason for need in self.needs if not need.is_met()), None)

    def on(self, device: str) -> "Case":
        """The case with the options of a device."""
        if device == "cuda" and self.on_cuda:
            options = {**self.options, **self.on_cuda}
            return replace(self, options=options, dtype="bfloat16", scale=GENTLE)
        return self

    def save(self, folder: Path) -> tuple[Path, Path]:
        """Checkpoints of the model: the library's, and the one upstream loads."""
        config = transformers.AutoConfig.for_model(self.model_type, **self.options)
        model = getattr(transformers, self.loader).from_config(config)
        randomise(model, self.seed, self.scale)
        for name, weight in model.named_parameters():
            if any(part in name for part in self.zeros):
                torch.nn.init.zeros_(weight)
        library = folder / "library"
        model.to(self.torch_dtype).save_pretrained(library)
        self._name(library)
        if self.processor is not None:
            self.processor(library)
        if self.twin is None:
            return library, library
        return library, self.twin.save(library, folder / "twin")

    def _name(self, folder: Path) -> None:
        """Replace the library's name of the architecture by upstream's."""
        path = folder / "config.json"
        config = json.loads(path.read_text())
        config["architectures"] = [self.architecture]
        path.write_text(json.dumps(config))


FIELDS = {one.name for one in fields(Case)}


def case(
    architecture: str, model_type: str, variant: str = "plain", **given: Any
) -> Case:
    """A case that differs from a plain one by the fields of `Case` that are given.

    Others are options of the model that differ from the common ones.
    """
    own = {name: given.pop(name) for name in FIELDS & given.keys()}
    return Case(
        architecture=architecture,
        model_type=model_type,
        variant=variant,
        options=common(**given),
        **own,
    )
