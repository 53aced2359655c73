# SPDX-License-Identifier: Apache-2.0
"""Where vectors come from, and whether they belong to a model."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm.v1.residual.bounds import shown
from vllm.v1.steering.errors import SteeringValidationError, fail
from vllm.v1.steering.plan import Tap, Vector
from vllm.v1.steering.spec.model_identity import ModelIdentity
from vllm.v1.steering.spec.parse import Parsed

LAYER_CONVENTION = "0-based block index"

TEXTS = ("model", "architecture", "model_type", "weights", "origin")
COUNTS = ("hidden_size", "num_layers")
MAX_TEXT = 4096
_NORM_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Source:
    """What says where vectors come from, as messages name it."""

    name: str
    """A file, or a module that is registered by a request."""
    is_file: bool = True

    def about(self, entry: str) -> tuple[str, str]:
        """How a message begins that is about an entry, and the parameter it names."""
        if self.is_file:
            return f"path: {self.name!r}", "path"
        return f"metadata.{entry}: the module {self.name!r}", f"metadata.{entry}"

    def copy_for(self, model: str) -> str:
        """How vectors are used with another model on purpose."""
        if self.is_file:
            return (
                "write a copy that says so: "
                f"vllm steer convert {self.name} COPY --for-model {model}"
            )
        return "leave model and weights out of its metadata"

    @property
    def mended(self) -> str:
        """What to do about vectors that are not those that were written down."""
        if self.is_file:
            return "the file is damaged or was changed by hand: make it again"
        return "send the vectors that the norms belong to, or leave the norms out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What is said of vectors; all of it may be unknown."""

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
    """By tensor name the norm of the vector, see `norms_of`."""

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
        found = {name: getattr(self, name) for name in TEXTS}
        found |= {name: str(getattr(self, name) or "") for name in COUNTS}
        found["norms"] = json.dumps(dict(self.norms)) if self.norms else ""
        marks = {"layer_convention": LAYER_CONVENTION}
        return {**{name: text for name, text in found.items() if text}, **marks}

    def facts(self) -> dict[str, Any]:
        """As plain data for an answer, nothing that is unknown."""
        found = {name: getattr(self, name) for name in (*TEXTS, *COUNTS)}
        found["norms"] = dict(self.norms)
        known = {name: value for name, value in found.items() if value}
        return {"layer_convention": LAYER_CONVENTION, **known}

    @classmethod
    def parse(cls, metadata: Any, source: Source) -> "Provenance":
        """What metadata say; entries of other names are for people.

        Raises:
            SteeringValidationError: an entry is not what its name says, or layers
                are counted in another way.

        """
        if not isinstance(metadata, Mapping):
            raise _unfit(source, "", "an object", metadata)
        convention = metadata.get("layer_convention")
        if convention not in (None, LAYER_CONVENTION):
            about, parameter = source.about("layer_convention")
            raise fail(
                f"{about} counts layers as {shown(convention)}; the layers must "
                f"be given as {LAYER_CONVENTION!r}",
                parameter,
                convention,
            )
        texts: dict[str, Any] = {name: metadata.get(name, "") for name in TEXTS}
        for name, text in texts.items():
            if not isinstance(text, str) or not _is_unicode(text):
                raise _unfit(source, name, "text", text)
            if len(text) > MAX_TEXT:
                what = f"text of at most {MAX_TEXT} characters"
                raise _unfit(source, name, what, len(text))
        return cls(
            **texts,
            hidden_size=_count(metadata, "hidden_size", source),
            num_layers=_count(metadata, "num_layers", source),
            norms=_norms(metadata.get("norms"), source),
        )

    def check_norms(self, norms: Mapping[str, float], source: Source) -> None:
        """Refuse vectors that are not those whose norms were written down.

        Args:
            norms: of the vectors that are there, by the same names.
            source: what said the norms.

        Raises:
            SteeringValidationError: a vector was damaged, changed or lost.

        """
        about, parameter = source.about("norms")
        for name, said in self.norms.items():
            found = norms.get(name)
            if found is None or not math.isclose(
                found, said, rel_tol=_NORM_TOLERANCE, abs_tol=1e-6
            ):
                raise fail(
                    f"{about} says that {name!r} has the norm {said:.6g}, but "
                    + ("it is missing" if found is None else f"it is {found:.6g}")
                    + f"; {source.mended}",
                    parameter,
                    said,
                )

    def check_model(self, identity: ModelIdentity, source: Source) -> None:
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
                    f"{source.about(name)[0]} was made for {what.format(made)}, this "
                    f"model ({identity.name}) has {here}; extract the vectors from "
                    "this model with vllm steer extract",
                    name if source.is_file else f"metadata.{name}",
                    made,
                )
        weights = identity.weights if self.weights else ""
        if self.weights and weights:
            entry, is_same = "weights", self.weights == weights
        else:
            entry, is_same = "model", not self.model or identity.is_named(self.model)
        if not is_same:
            raise fail(
                f"{source.about(entry)[0]} was made with the model {self.model!r}, "
                f"this is {identity.name!r}"
                + (" with other weights" if entry == "weights" else "")
                + "; extract the vectors from this model, or, to use them as they "
                f"are, {source.copy_for(identity.name)}",
                "model" if source.is_file else f"metadata.{entry}",
                getattr(self, entry),
            )


def norms_of(parsed: Mapping[str, Parsed]) -> dict[str, float]:
    """The norms of vectors as they are given, before they are scaled.

    By `HOOK.LAYER`, `prefill.HOOK.LAYER` or `decode.HOOK.LAYER`. Of several entries
    at one place number i is named `HOOK.LAYER[i]`, from 0.
    """
    found: dict[str, float] = {}
    for tier, one in parsed.items():
        prefix = "" if tier == "base" else f"{tier}."
        by_tap: dict[Tap, list[Vector]] = {}
        for entry in one.entries:
            by_tap.setdefault(entry.tap, []).append(entry.vector)
        for (layer, hook), vectors in by_tap.items():
            for number, vector in enumerate(vectors):
                which = f"[{number}]" if len(vectors) > 1 else ""
                name = f"{prefix}{hook}.{layer}{which}"
                found[name] = float(np.linalg.norm(vector.astype(np.float64)))
    return found


def parse_registered(metadata: Any, source: Source) -> Provenance:
    """What a request says of the vectors that it registers.

    Unlike those of a file, entries of other names are refused: nobody would read them.

    Raises:
        SteeringValidationError: an entry is unknown, or not what its name says.

    """
    if metadata is None:
        return Provenance()
    known = ["layer_convention", *TEXTS, *COUNTS, "norms"]
    unknown = (
        sorted(str(name) for name in metadata if name not in known)
        if isinstance(metadata, Mapping)
        else []
    )
    if unknown:
        raise fail(
            f"metadata.{unknown[0]}: there is no such entry; the entries are {known}",
            f"metadata.{unknown[0]}",
            unknown[0],
        )
    return Provenance.parse(metadata, source)


def _unfit(source: Source, name: str, what: str, value: Any) -> SteeringValidationError:
    if source.is_file:
        where = f"{name} in the metadata" if name else "the metadata"
        return fail(
            f"path: {where} of {source.name!r} must be {what}", name or "path", value
        )
    parameter = f"metadata.{name}" if name else "metadata"
    return fail(f"{parameter} must be {what}", parameter, value)


def _is_unicode(text: str) -> bool:
    """Whether an answer can tell it: JSON has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _count(metadata: Mapping[str, Any], name: str, source: Source) -> int | None:
    raw = metadata.get(name)
    if raw is None:
        return None
    # Safetensors' metadata are text only.
    if isinstance(raw, str) and raw.isascii() and raw.isdigit():
        raw = int(raw)
    if not isinstance(raw, int) or isinstance(raw, bool) or raw < 1:
        raise _unfit(source, name, "a count", raw)
    return raw


def _norms(raw: Any, source: Source) -> dict[str, float]:
    if raw is None:
        return {}
    try:
        norms = json.loads(raw) if isinstance(raw, str) else raw
    except ValueError:
        norms = None
    if not isinstance(norms, Mapping) or not all(
        isinstance(norm, (int, float))
        and math.isfinite(norm)
        and _is_unicode(str(name))
        for name, norm in norms.items()
    ):
        raise _unfit(source, "norms", "an object of numbers", raw)
    return {str(name): float(norm) for name, norm in norms.items()}
