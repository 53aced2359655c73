# SPDX-License-Identifier: Apache-2.0
"""Provenance of vectors, and checks that they belong to a model."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm.v1.residual.bounds import shown
from vllm.v1.residual.model_identity import ModelIdentity
from vllm.v1.residual.numbers import is_finite, is_integer
from vllm.v1.residual.tap import Tap
from vllm.v1.steering.errors import SteeringValidationError, fail
from vllm.v1.steering.plan import Vector
from vllm.v1.steering.spec.parse import Parsed

LAYER_CONVENTION = "0-based block index"

TEXTS = ("model", "architecture", "model_type", "weights", "origin")
COUNTS = ("hidden_size", "num_layers")
MAX_TEXT = 4096
_NORM_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of metadata, as messages name it."""

    name: str
    """The path of a file, or the name of a module that a request registers."""
    is_file: bool = True

    def about(self, entry: str) -> tuple[str, str]:
        """The beginning of a message about an entry, and the parameter's name."""
        if self.is_file:
            return f"path: {self.name!r}", "path"
        return f"metadata.{entry}: the module {self.name!r}", f"metadata.{entry}"

    def copy_for(self, model: str) -> str:
        """The advice for deliberate use of the vectors with another model."""
        if self.is_file:
            return (
                "write a copy that names it: "
                f"vllm steer convert {self.name} COPY --for-model {model}"
            )
        return "omit model and weights from its metadata"

    @property
    def mended(self) -> str:
        """The remedy for vectors that do not match the recorded norms."""
        if self.is_file:
            return "the file is damaged or was edited: create it again"
        return "send the vectors that the norms belong to, or omit the norms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Recorded facts about vectors; every field may be unknown."""

    model: str = ""
    """Name or folder of the model that they were made with."""
    architecture: str = ""
    """Architecture in the model's configuration, for example `LlamaForCausalLM`."""
    model_type: str = ""
    """Type in the model's configuration, for example `llama`."""
    weights: str = ""
    """Digest of the model's weights, see `model_identity.digest_of_weights`."""
    hidden_size: int | None = None
    num_layers: int | None = None
    origin: str = ""
    """How the vectors were made, as text for readers."""
    norms: Mapping[str, float] = field(default_factory=dict)
    """Euclidean norm of each vector by tensor name, see `norms_of`."""

    @classmethod
    def of_model(cls, identity: ModelIdentity, origin: str = "") -> "Provenance":
        """The provenance of vectors made with a model."""
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
        """The known facts as metadata of a file, which hold text only."""
        found = {name: getattr(self, name) for name in TEXTS}
        found |= {name: str(getattr(self, name) or "") for name in COUNTS}
        found["norms"] = json.dumps(dict(self.norms)) if self.norms else ""
        marks = {"layer_convention": LAYER_CONVENTION}
        return {**{name: text for name, text in found.items() if text}, **marks}

    def facts(self) -> dict[str, Any]:
        """The known facts as plain data for a response."""
        found = {name: getattr(self, name) for name in (*TEXTS, *COUNTS)}
        found["norms"] = dict(self.norms)
        known = {name: value for name, value in found.items() if value}
        return {"layer_convention": LAYER_CONVENTION, **known}

    @classmethod
    def parse(cls, metadata: Any, source: Source) -> "Provenance":
        """Parse metadata; entries with other names are ignored.

        Raises:
            SteeringValidationError: an entry has an invalid value, or layers are
                counted in another way.

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
        """Refuse vectors whose norms differ from the recorded ones.

        Args:
            norms: the norms of the present vectors, by the same names.
            source: the origin of the recorded norms.

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

        The digests of the weights decide whether it is the same model; if one of them
        is unknown, the names decide.

        Raises:
            SteeringValidationError: the message names what differs, and the remedy.

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
                    f"model ({identity.title}) has {here}; extract the vectors from "
                    "this model with vllm steer extract",
                    name if source.is_file else f"metadata.{name}",
                    made,
                )
        if entry := identity.differs(self.model, self.weights):
            raise fail(
                f"{source.about(entry)[0]} was made with the model {self.model!r}, "
                f"this is {identity.title!r}"
                + (" with other weights" if entry == "weights" else "")
                + "; extract the vectors from this model, or, to use them as they "
                f"are, {source.copy_for(identity.name)}",
                "model" if source.is_file else f"metadata.{entry}",
                getattr(self, entry),
            )


def norms_of(parsed: Mapping[str, Parsed]) -> dict[str, float]:
    """Euclidean norms of vectors before scaling, by name.

    Names are `HOOK.LAYER`, `prefill.HOOK.LAYER` or `decode.HOOK.LAYER`. Of several
    entries at one place, entry i is named `HOOK.LAYER[i]`, from 0.
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
    """Parse the metadata of a module that a request registers.

    Unlike in a file, entries with other names are refused, because nothing would read
    them.

    Raises:
        SteeringValidationError: an entry is unknown, or has an invalid value.

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
    """Whether a response can contain a text: JSON has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _count(metadata: Mapping[str, Any], name: str, source: Source) -> int | None:
    raw = metadata.get(name)
    if raw is None:
        return None
    # Safetensors metadata hold text only.
    if isinstance(raw, str) and raw.isascii() and raw.isdigit():
        raw = int(raw)
    if not is_integer(raw, 1):
        raise _unfit(source, name, "a count", raw)
    return int(raw)


def _norms(raw: Any, source: Source) -> dict[str, float]:
    if raw is None:
        return {}
    try:
        norms = json.loads(raw) if isinstance(raw, str) else raw
    except ValueError:
        norms = None
    if not isinstance(norms, Mapping) or not all(
        is_finite(norm) and _is_unicode(str(name)) for name, norm in norms.items()
    ):
        raise _unfit(source, "norms", "an object of numbers", raw)
    return {str(name): float(norm) for name, norm in norms.items()}
