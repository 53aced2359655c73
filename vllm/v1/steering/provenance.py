# SPDX-License-Identifier: Apache-2.0
"""Where a file of vectors comes from, and whether it belongs to a model."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.steering.errors import SteeringValidationError, fail
from vllm.v1.steering.identity import ModelIdentity

LAYER_CONVENTION = "0-based block index"

_TEXTS = ("model", "architecture", "model_type", "weights", "origin")
_COUNTS = ("hidden_size", "num_layers")
_NORM_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What a file says of its vectors; all of it may be unknown."""

    model: str = ""
    """The name or folder of the model that they were made with."""
    architecture: str = ""
    """As in the model's configuration, for example `LlamaForCausalLM`."""
    model_type: str = ""
    """As in the model's configuration, for example `llama`."""
    weights: str = ""
    """The digest of the model's weights, see `identity.digest_of_weights`."""
    hidden_size: int | None = None
    num_layers: int | None = None
    origin: str = ""
    """How the vectors were made, for people."""
    norms: Mapping[str, float] = field(default_factory=dict)
    """By tensor name the norm of the vector."""

    @classmethod
    def of_model(cls, identity: ModelIdentity, origin: str = "") -> "Provenance":
        """Vectors made with a model."""
        return cls(
            model=identity.name,
            architecture=identity.architecture,
            model_type=identity.model_type,
            weights=identity.weights,
            hidden_size=identity.hidden_size,
            num_layers=identity.num_layers,
            origin=origin,
        )

    def metadata(self) -> dict[str, str]:
        """As the metadata of a file: text only, nothing that is unknown."""
        found = {name: getattr(self, name) for name in _TEXTS}
        found |= {name: str(getattr(self, name) or "") for name in _COUNTS}
        found["norms"] = json.dumps(dict(self.norms)) if self.norms else ""
        marks = {"layer_convention": LAYER_CONVENTION}
        return {**{name: text for name, text in found.items() if text}, **marks}

    @classmethod
    def parse(cls, metadata: Any, file: str) -> "Provenance":
        """What a file's metadata says; entries of other names are for people.

        Raises:
            SteeringValidationError: an entry is not what its name says, or layers
                are counted in another way.

        """
        if not isinstance(metadata, Mapping):
            raise _unfit(file, "metadata", "an object", metadata)
        convention = metadata.get("layer_convention")
        if convention not in (None, LAYER_CONVENTION):
            raise fail(
                f"path: {file!r} counts layers as {convention!r}; the layers must "
                f"be given as {LAYER_CONVENTION!r}",
                "path",
                file,
            )
        texts: dict[str, Any] = {name: metadata.get(name, "") for name in _TEXTS}
        for name, text in texts.items():
            if not isinstance(text, str):
                raise _unfit(file, name, "text", text)
        return cls(
            **texts,
            hidden_size=_count(metadata, "hidden_size", file),
            num_layers=_count(metadata, "num_layers", file),
            norms=_norms(metadata.get("norms"), file),
        )

    def check_norms(self, norms: Mapping[str, float], file: str) -> None:
        """Refuse vectors that are not those whose norms were written down.

        Raises:
            SteeringValidationError: the file was damaged or changed by hand.

        """
        for name, said in self.norms.items():
            found = norms.get(name)
            if found is None or not math.isclose(
                found, said, rel_tol=_NORM_TOLERANCE, abs_tol=1e-6
            ):
                raise fail(
                    f"path: {file!r} says that {name!r} has the norm {said:.6g}, but "
                    + ("it is missing" if found is None else f"it is {found:.6g}")
                    + "; the file is damaged or was changed by hand: make it again",
                    "path",
                    file,
                )

    def check_model(self, identity: ModelIdentity, file: str) -> None:
        """Refuse vectors that were made with another model.

        Whether it is the same model the digest of the weights decides; where one of
        both is unknown, the name.

        Raises:
            SteeringValidationError: naming what differs, and the remedy.

        """
        for name, what in (
            ("hidden_size", "vectors of {} numbers"),
            ("num_layers", "a model of {} layers"),
            ("architecture", "the architecture {}"),
        ):
            made, here = getattr(self, name), getattr(identity, name)
            if made and here and made != here:
                raise fail(
                    f"path: {file!r} was made for {what.format(made)}, this model "
                    f"({identity.name}) has {here}; extract the vectors from this "
                    "model with vllm steer extract",
                    name,
                    made,
                )
        weights = identity.weights if self.weights else ""
        if self.weights and weights:
            is_same = self.weights == weights
        else:
            is_same = not self.model or identity.is_named(self.model)
        if not is_same:
            raise fail(
                f"path: {file!r} was made with the model {self.model!r}, this is "
                f"{identity.name!r}; extract the vectors from this model, or, to use "
                "them as they are, write a copy that says so: "
                f"vllm steer convert {file} COPY --for-model {identity.name}",
                "model",
                self.model,
            )


def _unfit(file: str, name: str, what: str, value: Any) -> SteeringValidationError:
    return fail(f"path: {name} in the metadata of {file!r} must be {what}", name, value)


def _count(metadata: Mapping[str, Any], name: str, file: str) -> int | None:
    raw = metadata.get(name)
    if raw is None:
        return None
    # Safetensors' metadata are text only.
    if isinstance(raw, str) and raw.isascii() and raw.isdigit():
        raw = int(raw)
    if not isinstance(raw, int) or isinstance(raw, bool) or raw < 1:
        raise _unfit(file, name, "a count", raw)
    return raw


def _norms(raw: Any, file: str) -> dict[str, float]:
    if raw is None:
        return {}
    try:
        norms = json.loads(raw) if isinstance(raw, str) else raw
    except ValueError:
        norms = None
    if not isinstance(norms, Mapping) or not all(
        isinstance(norm, (int, float)) and math.isfinite(norm)
        for norm in norms.values()
    ):
        raise _unfit(file, "norms", "an object of numbers", raw)
    return {str(name): float(norm) for name, norm in norms.items()}
