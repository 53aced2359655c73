# SPDX-License-Identifier: Apache-2.0
"""Our own forms of a file of vectors: safetensors with metadata, and JSON.

Safetensors: a tensor `[hidden_size]` per vector, named `HOOK.LAYER`,
`prefill.HOOK.LAYER` or `decode.HOOK.LAYER`; the metadata contain `format` and the
provenance. JSON: `{"vectors", "prefill_vectors", "decode_vectors"}` as in a request,
packed or not, and the provenance under `"metadata"`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vllm.v1.residual import array_files
from vllm.v1.residual.bounds import listed, shown
from vllm.v1.residual.plain_data import unique_object
from vllm.v1.residual.tap import Tap
from vllm.v1.steering.errors import fail
from vllm.v1.steering.spec.describe import FIELDS
from vllm.v1.steering.spec.provenance import Provenance, Source
from vllm.v1.steering.spec.reading import Reading

FORMAT = "clearbox-steering-v1"


@dataclass(frozen=True, slots=True)
class ModuleFile:
    """The content of a file of vectors."""

    vectors: dict[str, Any]
    """The vectors in the form of a request: `{"vectors": {hook: {layer: entry}},
    ...}`."""
    provenance: Provenance


def is_ours(file: Path) -> bool:
    """Whether a safetensors file is marked as one in our form.

    Raises:
        SteeringValidationError: the file is not a safetensors file.

    """
    try:
        return array_files.read_metadata(file).get("format") == FORMAT
    except ValueError as error:
        raise fail(
            f"path: {file.name!r} is not a safetensors file: {error}",
            "path",
            str(file),
        ) from None


def read_json(file: Path) -> ModuleFile:
    """Read a file in our JSON form; vectors are not checked here."""
    try:
        text = file.read_text(encoding="utf-8")
        raw = json.loads(text, object_pairs_hook=unique_object)
    except (ValueError, OSError) as error:
        raise fail(
            f"path: {file.name!r} is not JSON: {error}", "path", str(file)
        ) from None
    if not isinstance(raw, dict):
        raise fail(f"path: {file.name!r} must hold an object", "path", str(file))
    provenance = Provenance.parse(raw.pop("metadata", {}), Source(str(file)))
    return ModuleFile(raw, provenance)


def read_safetensors(file: Path, reading: Reading) -> ModuleFile:
    """Read the vectors that are asked for from a safetensors file in our form."""
    tensors = array_files.read_safetensors(file)
    said = Provenance.parse(array_files.read_metadata(file), Source(str(file)))
    norms = {name: _norm(tensor) for name, tensor in tensors.items()}
    said.check_norms(norms, Source(str(file)))
    places = {name: _place(name, file) for name in tensors}
    named = selected_keys(tensors, reading.key, file)
    kept = [name for name in named if reading.selects(places[name][1])]
    if not kept:
        raise reading.nothing_at(file.name, [places[name][1] for name in named])
    vectors: dict[str, Any] = {}
    for name in kept:
        field, (layer, hook) = places[name]
        by_layer = vectors.setdefault(field, {}).setdefault(hook, {})
        vector, scale = tensors[name], reading.scale
        entry = vector if scale is None else {"vector": vector, "scale": scale}
        by_layer[str(layer)] = entry
    norms = {name: norm for name, norm in said.norms.items() if name in kept}
    return ModuleFile(vectors, replace(said, norms=norms))


def selected_keys(tensors: Mapping[str, Any], key: str | None, file: Path) -> list[str]:
    """The names of all tensors, or the one that is asked for.

    Raises:
        SteeringValidationError: there are no tensors, or none of this name.

    """
    if not tensors:
        raise fail(f"path: {str(file)!r} has no vectors", "path", str(file))
    if key is None:
        return list(tensors)
    if key not in tensors:
        raise fail(
            f"key: {file.name!r} has no {shown(key)}; it has {listed(list(tensors))}",
            "key",
            key,
        )
    return [key]


def _norm(vector: torch.Tensor) -> float:
    return vector.double().norm().item()


def _place(name: str, file: Path) -> tuple[str, Tap]:
    """The field of a request and the place that a tensor's name means."""
    parts = name.split(".")
    tier = parts.pop(0) if len(parts) == 3 else "base"
    if len(parts) != 2 or tier not in FIELDS or not parts[1].isdecimal():
        raise fail(
            f"path: the tensor {name!r} of {file.name!r} is not named "
            "[prefill.|decode.]HOOK.LAYER",
            "path",
            str(file),
        )
    return FIELDS[tier], (int(parts[1]), parts[0])


def save_module(
    path: str | Path,
    vectors: Mapping[str, Mapping[int, torch.Tensor]] | None = None,
    prefill_vectors: Mapping[str, Mapping[int, torch.Tensor]] | None = None,
    decode_vectors: Mapping[str, Mapping[int, torch.Tensor]] | None = None,
    metadata: Mapping[str, str] | None = None,
    provenance: Provenance | None = None,
) -> None:
    """Write a safetensors file that `read_safetensors` reads.

    Args:
        path: path that ends in `.safetensors`.
        vectors: vectors for all tokens, `{hook: {layer: tensor [hidden_size]}}`.
        prefill_vectors: vectors added for prompt tokens only.
        decode_vectors: vectors added for generated tokens only.
        metadata: further metadata for readers; names that `Provenance` uses are checked
            on load.
        provenance: the model that the vectors belong to, and how they were made. The
            vectors' norms are written in any case.

    """
    from safetensors.torch import save

    tiers = {"": vectors, "prefill.": prefill_vectors, "decode.": decode_vectors}
    tensors = {
        f"{prefix}{hook}.{layer}": torch.as_tensor(vector).contiguous()
        for prefix, tier in tiers.items()
        for hook, layers in (tier or {}).items()
        for layer, vector in layers.items()
    }
    norms = {name: _norm(tensor) for name, tensor in tensors.items()}
    said = replace(provenance or Provenance(), norms=norms).metadata()
    # `save_file` would create files that only their owner can read.
    Path(path).write_bytes(
        save(tensors, metadata={**(metadata or {}), **said, "format": FORMAT})
    )
