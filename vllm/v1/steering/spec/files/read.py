# SPDX-License-Identifier: Apache-2.0
"""Reads a file of vectors of any form; which facts each form takes is in one table.

A `.svec` file, the format of IBM's activation-steering library, is a JSON object with
`model_type` and `directions`, which maps the number of a block to its vector. The
library adds the vector of block L to the input of the block, our `pre_attn` of layer L
(`activation_steering/leash_layer.py`).
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from vllm.exceptions import VLLMValidationError
from vllm.v1.residual.file_facts import split_facts
from vllm.v1.residual.plugin_errors import described
from vllm.v1.residual.sae.files import SAEFileError
from vllm.v1.residual.sae.load import is_sae, load_sae
from vllm.v1.steering.errors import SteeringValidationError, fail
from vllm.v1.steering.spec.files.dictionaries import read_dictionary
from vllm.v1.steering.spec.files.gguf import read_gguf
from vllm.v1.steering.spec.files.own import (
    ModuleFile,
    is_ours,
    read_json,
    read_safetensors,
)
from vllm.v1.steering.spec.files.vectors import VectorSet, additions_of, vector_set
from vllm.v1.steering.spec.provenance import Provenance
from vllm.v1.steering.spec.reading import Reading


def read_feature(path: Path, reading: Reading) -> VectorSet:
    """Read the decoder row of a feature.

    Args:
        path: a folder or file that `load_sae` reads.
        reading: the feature; and the layer and hook point where the SAE writes, if its
            file names no place.

    Raises:
        SteeringValidationError: it is no SAE, the feature does not exist, or the place
            is unknown or another one.

    """
    if reading.feature is None:
        raise fail(
            f"feature: {str(path)!r} is an SAE; select a feature with --feature",
            "feature",
            None,
        )
    try:
        sae = load_sae(path)
    except SAEFileError as error:
        raise fail(error.args[0], "path", str(path)) from None
    if not 0 <= reading.feature < len(sae.w_dec):
        raise fail(
            f"feature: {str(path)!r} has the features 0 to {len(sae.w_dec) - 1}",
            "feature",
            reading.feature,
        )
    tap = sae.writes.tap
    if tap is not None and not reading.selects(tap):
        raise reading.nothing_at(sae.name, [tap])
    if tap is None and reading.hook is not None and reading.layer is not None:
        tap = reading.layer, reading.hook
    if tap is None:
        raise fail(
            f"hook: {str(path)!r} writes at {sae.writes.name or 'a place'!r}, which is "
            "no hook point here; give the place of its rows with both --hook and "
            "--layer",
            "hook",
            reading.hook,
        )
    origin = f"feature {reading.feature} of the SAE {sae.name} ({sae.layout})"
    if sae.model:
        origin += f" for {sae.model}"
    row = sae.w_dec[reading.feature].float()
    return vector_set({tap: row}, Provenance(origin=origin), str(path))


SVEC_HOOK = "pre_attn"


def read_svec(file: Path) -> VectorSet:
    """Read the vectors of a `.svec` file.

    Raises:
        SteeringValidationError: the file is missing or invalid.

    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        directions = found["directions"]
        vectors = {(int(n), SVEC_HOOK): one for n, one in directions.items()}
        model_type = str(found.get("model_type", ""))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise fail(
            f"path: {file.name!r} is not an .svec file, a JSON object with the "
            f"directions of blocks: {type(error).__name__}: {error}",
            "path",
            str(file),
        ) from None
    said = Provenance(model_type=model_type, origin=f"{file.name}, activation-steering")
    return vector_set(vectors, said, str(file))


OURS = (".safetensors", ".json")
DICTIONARIES = (".pt", ".pth", ".npy", ".npz")


class Form(NamedTuple):
    """A form of file, and how it is read."""

    what: str
    """Its name in messages."""
    takes: tuple[str, ...]
    """The facts that its reader applies, besides `scale`."""
    read: Callable[[Path, Reading], ModuleFile | VectorSet]
    """Vectors are selected and scaled by the caller."""


def _from_json(file: Path, reading: Reading) -> ModuleFile | VectorSet:
    module = read_json(file)
    if not reading.given:
        return module
    found = additions_of(module, file)
    # Recorded norms are those of single entries, and have been checked.
    return replace(found, provenance=replace(found.provenance, norms={}))


def _from_gguf(file: Path, reading: Reading) -> VectorSet:
    return read_gguf(file, reading.gguf_layers or "applied", reading.key)


PLACE = ("hook", "layer")

FORMS = {
    "safetensors": Form("a file in our form", (*PLACE, "key"), read_safetensors),
    "json": Form("a file in our JSON form", PLACE, _from_json),
    "gguf": Form("a GGUF control vector", (*PLACE, "key", "gguf_layers"), _from_gguf),
    "svec": Form("an .svec file", PLACE, lambda file, _: read_svec(file)),
    "sae": Form("an SAE", (*PLACE, "feature"), read_feature),
    "dictionary": Form(
        "a dictionary of tensors", (*PLACE, "key", "numbers"), read_dictionary
    ),
}
"""The forms of files, and which facts each takes."""


def read_module(path: str | Path, reading: Reading | None = None) -> ModuleFile:
    """Read a file of vectors with its provenance.

    Args:
        path: a file, or the folder of an SAE; facts may be appended.
        reading: facts that are not appended.

    Raises:
        SteeringValidationError: the file is missing or of an unknown form, or a fact
            does not apply to it.

    """
    try:
        return _read(path, reading)
    except VLLMValidationError:
        raise
    except Exception as error:  # Whatever a library raises for a damaged file.
        raise fail(
            f"path: {str(path)!r} cannot be read: {described(error)}", "path", str(path)
        ) from error


def _read(path: str | Path, reading: Reading | None) -> ModuleFile:
    file, said = split_facts(path)
    reading = _together(Reading.parse(said) if said else None, reading)
    if not file.exists():
        raise fail(f"path: there is no file {str(path)!r}", "path", str(path))
    form = FORMS[_form_of(file)]
    for fact, value in reading.given.items():
        if fact not in (*form.takes, "scale"):
            raise fail(
                f"{fact}: {file.name!r} is {form.what}, to which {fact}={value} does "
                f"not apply; leave it out. {[*form.takes, 'scale']} do",
                fact,
                value,
            )
    found = form.read(file, reading)
    if isinstance(found, ModuleFile):
        return found
    scale = 1.0 if reading.scale is None else reading.scale
    vectors = found.selected(reading, file.name).spec(scale)
    return ModuleFile({"vectors": vectors}, found.provenance)


def read_vectors(path: str | Path, reading: Reading | None = None) -> VectorSet:
    """Read a file of vectors that are added to all tokens; as `read_module`.

    Raises:
        SteeringValidationError: as `read_module`; or the file contains something else.

    """
    return additions_of(read_module(path, reading), path)


def _together(appended: Reading | None, given: Reading | None) -> Reading:
    """The facts that are appended to a name, and those given beside it."""
    if appended is None or given is None:
        return appended or given or Reading()
    if twice := sorted(appended.given.keys() & given.given.keys()):
        raise fail(
            f"{twice[0]}: it is given after the file's name and beside it; leave out "
            "one of them",
            twice[0],
            given.given[twice[0]],
        )
    return replace(appended, **given.given)


def _form_of(file: Path) -> str:
    """The name of a file's form, by its own name and content."""
    if is_sae(file):
        return "sae"
    if file.suffix == ".safetensors":
        return "safetensors" if is_ours(file) else "dictionary"
    if file.suffix in (".json", ".gguf", ".svec"):
        return file.suffix[1:]
    if file.suffix in DICTIONARIES:
        return "dictionary"
    raise _unknown(file)


def _unknown(file: Path) -> SteeringValidationError:
    forms = [*OURS, ".gguf", ".svec", *DICTIONARIES]
    return fail(
        f"path: {str(file)!r} has no known form; known forms are {forms}, and the "
        "folder of an SAE",
        "path",
        str(file),
    )
