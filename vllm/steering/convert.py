# SPDX-License-Identifier: Apache-2.0
"""Converts vectors: selects, scales and writes them in other forms."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm.v1.residual.tap import Tap
from vllm.v1.steering.errors import fail
from vllm.v1.steering.plan import Vector
from vllm.v1.steering.spec.files import Reading, VectorSet, read_vectors
from vllm.v1.steering.spec.files.gguf import ARCHITECTURE, HOOK, Writer
from vllm.v1.steering.spec.provenance import Provenance, Source

__all__ = ["Reading", "for_model", "read_vectors", "reworked", "write_vectors"]

WRITTEN = (".safetensors", ".json", ".gguf", ".pt", ".pth", ".npz")


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
        _write_dictionary(file, vectors)
    else:
        raise fail(
            f"path: {str(file)!r} cannot be written; the forms that can be are "
            f"{list(WRITTEN)}",
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
    from vllm.v1.residual.model_identity import identity_of_path

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


def _write_dictionary(path: Path, vectors: VectorSet) -> None:
    """Write `{"HOOK.LAYER": vector}`, without the provenance."""
    named = {f"{hook}.{layer}": v for (layer, hook), v in vectors.vectors.items()}
    if path.suffix == ".npz":
        np.savez(path, **named)  # type: ignore[arg-type]
    else:
        tensors = {name: torch.from_numpy(v.copy()) for name, v in named.items()}
        torch.save(tensors, path)


def write_gguf(
    path: str | Path, vectors: VectorSet, writer: Writer = "repeng", hint: str = ""
) -> None:
    """Write a control vector that acts where the given vectors act.

    Args:
        path: the file to write.
        vectors: at `post_block`, or at `pre_attn` of layer L > 0, which is written as
            `post_block` of layer L - 1.
        writer: whose conventions to follow; only repeng's allow `direction.0`.
        hint: the model's type; by default that of the provenance.

    Raises:
        SteeringValidationError: a control vector cannot represent these vectors.

    """
    import gguf

    directions = _directions(vectors)
    if writer == "llama.cpp" and 0 in directions:
        raise fail(
            "layers: llama.cpp cannot add a vector to the output of block 0 and "
            "refuses direction.0; exclude this layer with --layers",
            "layers",
            0,
        )
    hint = hint or vectors.provenance.model_type or "unknown"
    out = gguf.GGUFWriter(path, ARCHITECTURE)
    out.add_string(f"{ARCHITECTURE}.model_hint", hint)
    count = out.add_int32 if writer == "llama.cpp" else out.add_uint32
    count(f"{ARCHITECTURE}.layer_count", len(directions))
    for layer, vector in sorted(directions.items()):
        out.add_tensor(f"direction.{layer}", vector.astype(np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def _directions(vectors: VectorSet) -> dict[int, Vector]:
    """The vectors by the block to whose output they are added; sums at equal blocks."""
    found: dict[int, Vector] = {}
    for tap, vector in sorted(vectors.vectors.items()):
        block = _block(tap)
        found[block] = found[block] + vector if block in found else vector
    return found


def _block(tap: Tap) -> int:
    layer, hook = tap
    if hook == HOOK:
        return layer
    if hook == "pre_attn" and layer > 0:
        return layer - 1
    raise fail(
        f"vectors: a control vector is added to the output of a block; {hook} of layer "
        f"{layer} is another place. Extract it at post_block instead",
        "vectors",
        f"{hook}.{layer}",
    )
