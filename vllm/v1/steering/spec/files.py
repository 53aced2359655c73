# SPDX-License-Identifier: Apache-2.0
"""Files of named vectors: safetensors with metadata, JSON, and other projects' forms.

Safetensors: a tensor `[hidden_size]` per vector, named `HOOK.LAYER`,
`prefill.HOOK.LAYER` or `decode.HOOK.LAYER`; the metadata contain `format` and the
provenance. JSON: `{"vectors", "prefill_vectors", "decode_vectors"}` as in a request,
packed or not, and the provenance under `"metadata"`. Any form that `vllm.steering`
reads is accepted as well; facts that such a file does not contain are appended to its
name, as in `FILE?hook=post_block&layer=15`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vllm.v1.residual.plain_data import unique_object
from vllm.v1.steering.errors import fail
from vllm.v1.steering.spec.describe import FIELDS
from vllm.v1.steering.spec.model_identity import ModelIdentity
from vllm.v1.steering.spec.provenance import Provenance, Source

FORMAT = "clearbox-steering-v1"


@dataclass(frozen=True, slots=True)
class ModuleFile:
    """The content of a file of vectors."""

    vectors: dict[str, Any]
    """The vectors in the form of a request: `{"vectors": {hook: {layer: entry}},
    ...}`."""
    provenance: Provenance


def load_module(
    path: str | Path, identity: ModelIdentity | None = None
) -> dict[str, Any]:
    """Read a file of vectors into the form of a request.

    Hook points, layers and numbers are not checked here.

    Args:
        path: a file, with appended facts if it needs them.
        identity: the model for which the vectors must have been made; None skips the
            check.

    Raises:
        SteeringValidationError: the file is missing, of an unknown form, or made for
            another model.

    """
    module = read_module(path)
    if identity is not None:
        module.provenance.check_model(identity, Source(str(path)))
    return module.vectors


def read_module(path: str | Path) -> ModuleFile:
    """Read a file of vectors with its provenance.

    Raises:
        SteeringValidationError: the file is missing or of an unknown form.

    """
    file, said = split_place(path)
    if not file.exists():
        raise fail(f"path: there is no file {str(path)!r}", "path", str(path))
    if not said and file.suffix == ".safetensors" and is_ours(file):
        return _load_safetensors(file)
    if not said and file.suffix == ".json" and file.is_file():
        return _load_json(file)
    from vllm.steering.convert import Reading, read_vectors

    found = read_vectors(file, Reading.parse(said) if said else None)
    return ModuleFile({"vectors": found.spec()}, found.provenance)


def split_place(path: str | Path) -> tuple[Path, str]:
    """Split `FILE?hook=post_block&layer=15` into the path and the appended facts."""
    file = Path(path)
    if file.exists() or "?" not in file.name:
        return file, ""
    name, _, said = str(path).rpartition("?")
    return Path(name), said


def is_ours(file: Path) -> bool:
    """Whether a safetensors file is marked as one in our form.

    Raises:
        SteeringValidationError: the file is not a safetensors file.

    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            return (opened.metadata() or {}).get("format") == FORMAT
    except (SafetensorError, OSError) as error:
        raise fail(
            f"path: {file.name!r} is not a safetensors file: {error}",
            "path",
            str(file),
        ) from None


def _load_json(file: Path) -> ModuleFile:
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


def _load_safetensors(file: Path) -> ModuleFile:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:  # `is_ours` has checked the file.
        metadata = opened.metadata() or {}
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    provenance = Provenance.parse(metadata, Source(str(file)))
    norms = {name: _norm(tensor) for name, tensor in tensors.items()}
    provenance.check_norms(norms, Source(str(file)))
    return ModuleFile(_by_tier(tensors, file), provenance)


def _norm(vector: torch.Tensor) -> float:
    return vector.double().norm().item()


def _by_tier(tensors: Mapping[str, torch.Tensor], file: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        tier = parts.pop(0) if len(parts) == 3 else "base"
        if len(parts) != 2 or tier not in FIELDS:
            raise fail(
                f"path: the tensor {name!r} of {file.name!r} is not named "
                "[prefill.|decode.]HOOK.LAYER",
                "path",
                str(file),
            )
        hook, layer = parts
        found.setdefault(FIELDS[tier], {}).setdefault(hook, {})[layer] = tensor
    return found


def save_module(
    path: str | Path,
    vectors: Mapping[str, Mapping[int, torch.Tensor]] | None = None,
    prefill_vectors: Mapping[str, Mapping[int, torch.Tensor]] | None = None,
    decode_vectors: Mapping[str, Mapping[int, torch.Tensor]] | None = None,
    metadata: Mapping[str, str] | None = None,
    provenance: Provenance | None = None,
) -> None:
    """Write a safetensors file that `load_module` reads.

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
