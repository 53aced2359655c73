# SPDX-License-Identifier: Apache-2.0
"""Reads and writes vectors in all supported file formats."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vllm.steering.dictionaries import (
    NUMBERS,
    Numbers,
    read_dictionary,
    write_dictionary,
)
from vllm.steering.gguf import Layers, Writer, read_gguf, write_gguf
from vllm.steering.sae.load import load_sae
from vllm.steering.saelens import CONFIG, WEIGHTS, read_saelens
from vllm.steering.svec import read_svec
from vllm.steering.vectors import VectorSet, load_vectors, vector_set
from vllm.v1.residual.addresses import resolve_tap
from vllm.v1.residual.bounds import shown
from vllm.v1.residual.tap import HOOK_NAMES, Tap
from vllm.v1.steering.errors import SteeringValidationError, fail
from vllm.v1.steering.spec.files import is_ours
from vllm.v1.steering.spec.provenance import Provenance, Source

SAE_FILES = (CONFIG, "params.npz", "params.safetensors")
"""Files by which an SAE's folder is recognised."""
OURS = (".safetensors", ".json")
DICTIONARIES = (".pt", ".pth", ".npy", ".npz")
WRITTEN = (".pt", ".pth", ".npz")
SVEC = ".svec"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How to read a file: information that the file itself may lack."""

    hook: str | None = None
    """Hook point where vectors act: for dictionaries, single vectors and SAEs."""
    layer: int | None = None
    """0-based layer: for single vectors and SAEs."""
    numbers: Numbers | None = None
    """Meaning of numeric keys in a dictionary, see `NUMBERS`."""
    gguf_layers: Layers = "applied"
    """Whether `direction.L` of a GGUF file is put where it is applied or measured."""
    feature: int | None = None
    """Row of an SAE's decoder."""
    key: str | None = None
    """Name of the tensor to read from a file with several."""
    scale: float = 1.0
    """Factor for the vectors."""

    @classmethod
    def parse(cls, text: str) -> "Reading":
        """Parse the options after a file's name, such as `hook=post_block&layer=15`.

        Raises:
            SteeringValidationError: an option is unknown or its value is invalid.

        """
        kinds = {"layer": int, "feature": int, "scale": float}
        values: dict[str, Any] = {}
        for part in text.split("&"):
            name, _, value = part.partition("=")
            try:
                values[name] = kinds.get(name, str)(value)
                _check_choice(name, values[name])
            except (KeyError, ValueError):
                raise fail(
                    f"path: {shown(part)} after the file's name must be one of "
                    f"{list(_CHOICES)} with a valid value, as in "
                    "FILE?hook=post_block&layer=15",
                    "path",
                    text,
                ) from None
        if "hook" in values:
            found = resolve_tap(values.get("layer"), values["hook"])
            if found is None:
                raise fail(
                    f"path: hook={shown(values['hook'])} after the file's name must be "
                    f"one of {list(HOOK_NAMES)}, or an address such as post_block.3 "
                    "without another layer",
                    "path",
                    text,
                )
            values["layer"], values["hook"] = found
        return cls(**values)


_CHOICES: dict[str, tuple[str, ...]] = {
    "hook": (),
    "layer": (),
    "numbers": tuple(NUMBERS),
    "gguf_layers": ("applied", "measured"),
    "feature": (),
    "key": (),
    "scale": (),
}


def _check_choice(name: str, value: Any) -> None:
    """Raise KeyError for an unknown option and ValueError for an invalid value."""
    allowed = _CHOICES[name]
    if allowed and value not in allowed:
        raise ValueError(value)


def read_vectors(path: str | Path, reading: Reading | None = None) -> VectorSet:
    """Read a file of vectors; its name determines the format.

    Args:
        path: a file, or the folder of an SAE.
        reading: information that the file lacks.

    Raises:
        SteeringValidationError: the format is unknown or the file is invalid.

    """
    reading = reading or Reading()
    file = Path(path)
    found = _read(file, reading)
    return found if reading.scale == 1.0 else reworked(found, scale=reading.scale)


def _read(file: Path, reading: Reading) -> VectorSet:
    if file.is_dir() or file.name in SAE_FILES or reading.feature is not None:
        return _read_sae(file.parent if file.name == CONFIG else file, reading)
    if file.suffix in OURS and not _is_foreign(file, reading):
        return load_vectors(file)
    if file.suffix == ".gguf":
        return read_gguf(file, reading.gguf_layers)
    if file.suffix == SVEC:
        return read_svec(file, reading.hook)
    if file.suffix in (*DICTIONARIES, ".safetensors"):
        hook = reading.hook or "post_block"
        return read_dictionary(file, reading.numbers, hook, reading.layer, reading.key)
    raise _unknown(file)


def _is_foreign(file: Path, reading: Reading) -> bool:
    """Whether a safetensors file is to be read as a dictionary of tensors."""
    if file.suffix != ".safetensors" or not file.is_file():
        return False
    chosen = reading.key is not None or reading.layer is not None
    return chosen or not is_ours(file)


def write_vectors(
    path: str | Path, vectors: VectorSet, writer: Writer = "repeng", hint: str = ""
) -> None:
    """Write vectors; the file's suffix determines the format.

    Args:
        path: the file to write.
        vectors: the vectors to write.
        writer: for GGUF, whose conventions to follow.
        hint: for GGUF, the model's type.

    Raises:
        SteeringValidationError: the format is unknown, or it cannot represent these
            vectors.

    """
    file = Path(path)
    if not file.absolute().parent.is_dir():
        raise fail(
            f"path: there is no folder {str(file.parent)!r}; create it first",
            "path",
            str(path),
        )
    if file.suffix == ".safetensors":
        vectors.save(file)
    elif file.suffix == ".json":
        file.write_text(_json(vectors), encoding="utf-8")
    elif file.suffix == ".gguf":
        write_gguf(file, vectors, writer, hint)
    elif file.suffix in WRITTEN:
        write_dictionary(file, vectors)
    else:
        raise fail(
            f"path: {str(file)!r} cannot be written; the forms that can be are "
            f"{[*OURS, '.gguf', *WRITTEN]}",
            "path",
            str(file),
        )


def reworked(
    vectors: VectorSet,
    layers: Iterable[int] | None = None,
    scale: float = 1.0,
    unit: bool = False,
) -> VectorSet:
    """Select, normalise and scale vectors.

    Args:
        vectors: the vectors; not changed.
        layers: the layers to keep; all by default.
        scale: factor, applied last.
        unit: whether to normalise each vector to length 1.

    Raises:
        SteeringValidationError: a layer has no vector, or `unit` with a zero vector.

    """
    chosen = vectors if layers is None else vectors.at(layers)
    done: dict[Tap, Any] = {}
    for tap, vector in chosen.vectors.items():
        length = chosen.norm(tap) if unit else 1.0
        if length == 0:
            raise fail(
                f"vectors: {tap[1]} of layer {tap[0]} is zero and has no unit vector",
                "vectors",
                list(tap),
            )
        done[tap] = (vector * np.float64(scale / length)).astype(np.float32)
    return replace(chosen, vectors=done)


def for_model(vectors: VectorSet, model: str) -> VectorSet:
    """The same vectors with the provenance of a model.

    Args:
        vectors: the vectors; not changed.
        model: name or path of the model.

    Raises:
        SteeringValidationError: the model does not exist, or hidden size or depth do
            not match.

    """
    from vllm.v1.steering.spec.model_identity import identity_of_path

    try:
        identity = identity_of_path(model)
    except (OSError, ValueError) as error:
        raise fail(
            f"for_model: {model!r} is not a model: {str(error).splitlines()[0]}",
            "for_model",
            model,
        ) from None
    said = Provenance.of_model(identity, vectors.provenance.origin)
    fitting = Provenance(hidden_size=vectors.width)
    fitting.check_model(identity, Source("these vectors"))
    deepest = vectors.taps[-1][0]
    if identity.num_layers is not None and deepest >= identity.num_layers:
        raise fail(
            f"for_model: there is a vector for layer {deepest}, but {model!r} has the "
            f"layers 0 to {identity.num_layers - 1}",
            "for_model",
            deepest,
        )
    return replace(vectors, provenance=said)


def _read_sae(folder: Path, reading: Reading) -> VectorSet:
    if reading.feature is None:
        raise fail(
            f"feature: {str(folder)!r} is an SAE; select a feature with --feature",
            "feature",
            None,
        )
    tap = None
    if reading.hook is not None or reading.layer is not None:
        if reading.hook is None or reading.layer is None:
            raise fail(
                "hook: for an SAE give both --hook and --layer, or neither",
                "hook",
                reading.hook,
            )
        tap = (reading.layer, reading.hook)
    if (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file():
        return read_saelens(folder, reading.feature, tap)
    sae = load_sae(folder)
    place = tap or sae.writes.tap
    if place is None or not 0 <= reading.feature < len(sae.w_dec):
        wrong = "hook" if place is None else "feature"
        raise fail(
            f"{wrong}: {str(folder)!r} has the features 0 to {len(sae.w_dec) - 1} at "
            f"{sae.writes.name or 'a place that it does not name'}"
            + ("; give the place of one with --hook and --layer" if not place else ""),
            wrong,
            reading.feature,
        )
    origin = f"feature {reading.feature} of the SAE {sae.name} ({sae.layout})"
    row = sae.w_dec[reading.feature].float()
    return vector_set({place: row}, Provenance(origin=origin), str(folder))


def _json(vectors: VectorSet) -> str:
    spec = {
        hook: {str(layer): entry["vector"].tolist() for layer, entry in layers.items()}
        for hook, layers in vectors.spec().items()
    }
    norms = {
        f"{hook}.{layer}": vectors.norm((layer, hook)) for layer, hook in vectors.taps
    }
    said = replace(vectors.provenance, norms=norms).metadata()
    return json.dumps({"vectors": spec, "metadata": said})


def _unknown(file: Path) -> SteeringValidationError:
    forms = [*OURS, ".gguf", SVEC, *DICTIONARIES]
    return fail(
        f"path: {str(file)!r} has no known form; known forms are {forms}, and the "
        "folder of an SAE",
        "path",
        str(file),
    )
