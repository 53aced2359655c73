# SPDX-License-Identifier: Apache-2.0
"""Files of named vectors: safetensors with metadata, or JSON.

Safetensors: a tensor `[hidden_size]` per vector, named `HOOK.LAYER`,
`prefill.HOOK.LAYER` or `decode.HOOK.LAYER`; the metadata says `format` and
`layer_convention`. JSON: `{"vectors", "prefill_vectors", "decode_vectors"}` as in a
request, packed or not.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vllm.v1.steering.errors import fail

FORMAT = "clearbox-steering-v1"
LAYER_CONVENTION = "0-based block index"

_KEYS = {"base": "vectors", "prefill": "prefill_vectors", "decode": "decode_vectors"}


def load_module(path: str | Path) -> dict[str, Any]:
    """What a file holds, in the form of a request: not yet checked against a model.

    Raises:
        SteeringValidationError: the file is missing or not of a known form.

    """
    file = Path(path)
    if not file.is_file():
        raise fail(f"path: there is no file {str(path)!r}", "path", str(path))
    if file.suffix == ".safetensors":
        return _load_safetensors(file)
    if file.suffix == ".json":
        return _load_json(file)
    raise fail(
        f"path: {file.name!r} is neither .safetensors nor .json", "path", str(path)
    )


def _load_json(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise fail(
            f"path: {file.name!r} is not JSON: {error}", "path", str(file)
        ) from None
    if not isinstance(raw, dict):
        raise fail(f"path: {file.name!r} must hold an object", "path", str(file))
    metadata = raw.pop("metadata", {})
    _check_convention(metadata, file)
    return raw


def _load_safetensors(file: Path) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise fail(
            f"path: {file.name!r} is not a safetensors file: {error}",
            "path",
            str(file),
        ) from None
    if metadata.get("format") != FORMAT:
        raise fail(
            f"path: {file.name!r} does not say format={FORMAT!r} in its metadata; "
            "write it with vllm.v1.steering.files.save_module",
            "path",
            str(file),
        )
    _check_convention(metadata, file)
    return _by_tier(tensors, file)


def _check_convention(metadata: Any, file: Path) -> None:
    convention = metadata.get("layer_convention") if isinstance(metadata, dict) else ""
    if convention not in (None, LAYER_CONVENTION):
        raise fail(
            f"path: {file.name!r} counts layers as {convention!r}; the layers must "
            f"be given as {LAYER_CONVENTION!r}",
            "path",
            str(file),
        )


def _by_tier(tensors: Mapping[str, torch.Tensor], file: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        tier = parts.pop(0) if len(parts) == 3 else "base"
        if len(parts) != 2 or tier not in _KEYS:
            raise fail(
                f"path: the tensor {name!r} of {file.name!r} is not named "
                "[prefill.|decode.]HOOK.LAYER",
                "path",
                str(file),
            )
        hook, layer = parts
        found.setdefault(_KEYS[tier], {}).setdefault(hook, {})[layer] = tensor
    return found


def save_module(
    path: str | Path,
    vectors: Mapping[str, Mapping[int, torch.Tensor]] | None = None,
    prefill_vectors: Mapping[str, Mapping[int, torch.Tensor]] | None = None,
    decode_vectors: Mapping[str, Mapping[int, torch.Tensor]] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file that `load_module` reads.

    Args:
        path: ends in `.safetensors`.
        vectors: for all tokens, `{hook: {layer: tensor [hidden_size]}}`.
        prefill_vectors: for prompt tokens, on top.
        decode_vectors: for generated tokens, on top.
        metadata: where the vectors come from, for people.

    """
    from safetensors.torch import save_file

    tiers = {"": vectors, "prefill.": prefill_vectors, "decode.": decode_vectors}
    tensors = {
        f"{prefix}{hook}.{layer}": torch.as_tensor(vector).contiguous()
        for prefix, tier in tiers.items()
        for hook, layers in (tier or {}).items()
        for layer, vector in layers.items()
    }
    marks = {"format": FORMAT, "layer_convention": LAYER_CONVENTION}
    save_file(tensors, path, metadata={**(metadata or {}), **marks})
