# SPDX-License-Identifier: Apache-2.0
"""A set of vectors by layer and hook point, with their provenance."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm.v1.residual.tap import Tap
from vllm.v1.steering.errors import fail
from vllm.v1.steering.plan import Vector
from vllm.v1.steering.spec.files.own import ModuleFile, save_module
from vllm.v1.steering.spec.parse import HOOKS, SteeredModel, parse_vectors
from vllm.v1.steering.spec.provenance import Provenance, Source, norms_of
from vllm.v1.steering.spec.reading import Reading


@dataclass(frozen=True, slots=True)
class VectorSet:
    """Vectors `[hidden_size]` in float32, one for each `(layer, hook)`."""

    vectors: Mapping[Tap, Vector]
    provenance: Provenance = field(default_factory=Provenance)

    @property
    def width(self) -> int:
        """The hidden size."""
        return len(next(iter(self.vectors.values())))

    @property
    def taps(self) -> list[Tap]:
        """The `(layer, hook)` of all vectors, sorted."""
        return sorted(self.vectors)

    def norm(self, tap: Tap) -> float:
        """The Euclidean norm of a vector."""
        return float(np.linalg.norm(self.vectors[tap].astype(np.float64)))

    def at(self, layers: Iterable[int]) -> "VectorSet":
        """The vectors at the given layers.

        Raises:
            SteeringValidationError: a layer has no vector.

        """
        wanted = set(layers)
        having = {layer for layer, _ in self.vectors}
        if missing := sorted(wanted - having):
            raise fail(
                f"layers: there is no vector at layer {missing[0]}; there are vectors "
                f"at {sorted(having)}",
                "layers",
                missing[0],
            )
        kept = {tap: v for tap, v in self.vectors.items() if tap[0] in wanted}
        return replace(self, vectors=kept)

    def selected(self, reading: Reading, name: str) -> "VectorSet":
        """The vectors at the layer and hook point that are asked for, if any are.

        Raises:
            SteeringValidationError: the file `name` has no vector there.

        """
        kept = {tap: v for tap, v in self.vectors.items() if reading.selects(tap)}
        if not kept:
            raise reading.nothing_at(name, self.taps)
        return replace(self, vectors=kept)

    def spec(self, scale: float = 1.0) -> dict[str, dict[int, dict[str, Any]]]:
        """As a request has them: `{hook: {layer: {"vector", "scale"}}}`."""
        found: dict[str, dict[int, dict[str, Any]]] = {}
        for (layer, hook), vector in sorted(self.vectors.items()):
            entry = {"vector": vector, "scale": scale}
            found.setdefault(hook, {})[layer] = entry
        return found

    def save(self, path: str | Path) -> None:
        """Write our safetensors format, which `--steering-modules` reads.

        Raises:
            SteeringValidationError: `path` does not end in `.safetensors`.

        """
        if Path(path).suffix != ".safetensors":
            raise fail(
                f"path: {str(path)!r} must end in .safetensors", "path", str(path)
            )
        tensors: dict[str, dict[int, torch.Tensor]] = {}
        for (layer, hook), vector in sorted(self.vectors.items()):
            tensors.setdefault(hook, {})[layer] = torch.from_numpy(vector.copy())
        save_module(path, tensors, provenance=self.provenance)


def vector_set(
    vectors: Mapping[Tap, Any], provenance: Provenance | None = None, source: str = ""
) -> VectorSet:
    """Build a `VectorSet` and check that all vectors are finite and of one width.

    Args:
        vectors: a list, an array or a tensor by `(layer, hook)`; at least one.
        provenance: copied with `hidden_size` set to the vectors' width.
        source: where the vectors come from, for error messages.

    Raises:
        SteeringValidationError: a vector is invalid; the message names it.

    """
    if not vectors:
        raise fail(f"{source}: there are no vectors", "vectors", [])
    first = next(iter(vectors.values()))
    width = int(np.prod(np.shape(first)))
    points = {layer: HOOKS for layer, _ in vectors}
    model = SteeredModel(points, width, torch.float32)
    spec: dict[str, dict[int, Any]] = {}
    for (layer, hook), vector in vectors.items():
        spec.setdefault(hook, {})[layer] = vector
    entries = parse_vectors(spec, model, source).entries
    said = replace(provenance or Provenance(), hidden_size=width)
    return VectorSet({one.tap: one.scaled(model, source) for one in entries}, said)


def additions_of(module: ModuleFile, path: str | Path) -> VectorSet:
    """The vectors of a file that has nothing but vectors added to all tokens.

    Raises:
        SteeringValidationError: the file is invalid, or contains more.

    """
    if list(module.vectors) != ["vectors"]:
        raise fail(
            f"path: {str(path)!r} has {sorted(module.vectors)}; only `vectors`, for "
            "all tokens, can be used here",
            "path",
            sorted(module.vectors),
        )
    spec = module.vectors["vectors"]
    if not isinstance(spec, Mapping):
        raise fail(f"path: {str(path)!r}: vectors must be an object", "path", spec)
    width = module.provenance.hidden_size or _first_width(spec)
    every = {layer: HOOKS for layer in range(_MOST_LAYERS)}
    model = SteeredModel(every, width, torch.float32)
    parsed = parse_vectors(spec, model, str(path))
    module.provenance.check_norms(norms_of({"base": parsed}), Source(str(path)))
    if parsed.operations or parsed.generated is not None:
        first = parsed.operations[0].op if parsed.operations else "all_generated"
        raise fail(
            f"path: {str(path)!r} has operations other than adding a vector to all "
            f"tokens ({first}); only additions can be used here",
            "path",
            first,
        )
    return VectorSet(parsed.vectors, replace(module.provenance, hidden_size=width))


_MOST_LAYERS = 4096
"""More layers than any model has."""


def _first_width(spec: Any) -> int:
    """The width of the first vector, against which all others are checked."""
    while isinstance(spec, Mapping):
        if "shape" in spec:
            spec = spec["shape"]
            return int(spec[-1]) if isinstance(spec, (list, tuple)) and spec else 0
        spec = spec.get("vector", next(iter(spec.values()), None))
    if isinstance(spec, (list, tuple)) and spec and isinstance(spec[0], Mapping):
        return _first_width(spec[0])
    return 0 if spec is None else int(np.prod(np.shape(spec)))
