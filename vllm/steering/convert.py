# SPDX-License-Identifier: Apache-2.0
"""From any form of vectors to any other."""

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
from vllm.v1.residual.bounds import shown
from vllm.v1.steering.errors import SteeringValidationError, fail
from vllm.v1.steering.plan import Tap
from vllm.v1.steering.spec.files import is_ours
from vllm.v1.steering.spec.parse import HOOKS
from vllm.v1.steering.spec.provenance import Provenance, Source

SAE_FILES = (CONFIG, "params.npz", "params.safetensors")
"""Names of files that belong to an SAE's folder."""
OURS = (".safetensors", ".json")
DICTIONARIES = (".pt", ".pth", ".npy", ".npz")
WRITTEN = (".pt", ".pth", ".npz")
SVEC = ".svec"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a file does not say of itself."""

    hook: str | None = None
    """Where vectors act, for dictionaries, one vector and SAEs."""
    layer: int | None = None
    """At which layer, for one vector and SAEs."""
    numbers: Numbers | None = None
    """What a number means in a dictionary."""
    gguf_layers: Layers = "applied"
    """Whether `direction.L` goes where it is applied, or where it was measured."""
    feature: int | None = None
    """Which row of an SAE."""
    key: str | None = None
    """Which tensor of a file of several."""
    scale: float = 1.0
    """What to multiply the vectors by."""

    @classmethod
    def parse(cls, text: str) -> "Reading":
        """What `hook=post_block&layer=15` says, behind a file's name.

        Raises:
            SteeringValidationError: a name is unknown, or a value is not of its kind.

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
                    f"path: {shown(part)} behind the file's name is none of "
                    f"{list(_CHOICES)} with a fitting value, as in "
                    "FILE?hook=post_block&layer=15",
                    "path",
                    text,
                ) from None
        return cls(**values)


_CHOICES: dict[str, tuple[str, ...]] = {
    "hook": HOOKS,
    "layer": (),
    "numbers": tuple(NUMBERS),
    "gguf_layers": ("applied", "measured"),
    "feature": (),
    "key": (),
    "scale": (),
}


def _check_choice(name: str, value: Any) -> None:
    """Fail for a name that there is not, and a value that it does not have."""
    allowed = _CHOICES[name]
    if allowed and value not in allowed:
        raise ValueError(value)


def read_vectors(path: str | Path, reading: Reading | None = None) -> VectorSet:
    """The vectors of a file in any form, told by its name.

    Raises:
        SteeringValidationError: its form is unknown, or it is not what it says.

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
    """Whether a file with an ending of ours has tensors by names of its own."""
    if file.suffix != ".safetensors" or not file.is_file():
        return False
    chosen = reading.key is not None or reading.layer is not None
    return chosen or not is_ours(file)


def write_vectors(
    path: str | Path, vectors: VectorSet, writer: Writer = "repeng", hint: str = ""
) -> None:
    """Write vectors in the form that the file's name tells.

    Args:
        path: the file.
        vectors: what to write.
        writer: for GGUF, whose form.
        hint: for GGUF, the model's type.

    Raises:
        SteeringValidationError: the form is unknown, or cannot say this.

    """
    file = Path(path)
    if not file.absolute().parent.is_dir():
        raise fail(
            f"path: there is no folder {str(file.parent)!r}; make it first",
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
        raise _unknown(file)


def reworked(
    vectors: VectorSet,
    layers: Iterable[int] | None = None,
    scale: float = 1.0,
    unit: bool = False,
) -> VectorSet:
    """The vectors at some layers, first brought to length 1 if `unit`, then scaled."""
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
    """The same vectors, said to belong to a model.

    Raises:
        SteeringValidationError: there is no such model, or the vectors do not fit it.

    """
    from vllm.v1.steering.spec.model_identity import identity_of_path

    try:
        identity = identity_of_path(model)
    except (OSError, ValueError) as error:
        raise fail(
            f"for_model: {model!r} is no model: {str(error).splitlines()[0]}",
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
            f"feature: {str(folder)!r} is an SAE; say which of its features with "
            "--feature",
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
            + ("; say where to add one with --hook and --layer" if not place else ""),
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
        f"path: {str(file)!r} has no known form; the forms are {forms}, and the folder "
        "of an SAE",
        "path",
        str(file),
    )
