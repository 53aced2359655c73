# SPDX-License-Identifier: Apache-2.0
"""A set of vectors by layer and hook point, with their provenance."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm.v1.residual.tap import INNER_POINTS, Tap, hook_name, parse_address
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
    def width(self) -> int | None:
        """The hidden size; None if no vector acts on the stream itself."""
        widths = (
            len(v) for tap, v in self.vectors.items() if tap[1] not in INNER_POINTS
        )
        return next(widths, None)

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
    """Build a `VectorSet` and check that all vectors are finite.

    Those of the stream must have one width; at points inside a block, the rows of each
    hook point.

    Args:
        vectors: a list, an array or a tensor by `(layer, hook)`; at least one.
        provenance: copied with `hidden_size` set to the width of the stream's vectors.
        source: where the vectors come from, for error messages.

    Raises:
        SteeringValidationError: a vector is invalid; the message names it.

    """
    if not vectors:
        raise fail(f"{source}: there are no vectors", "vectors", [])
    spec: dict[str, dict[int, Any]] = {}
    for (layer, hook), vector in vectors.items():
        spec.setdefault(hook, {})[layer] = vector
    model = _model_of(spec)
    entries = parse_vectors(spec, model, source).entries
    said = provenance or Provenance()
    made = VectorSet({one.tap: one.scaled(model, source) for one in entries}, said)
    said = replace(said, hidden_size=made.width or said.hidden_size)
    return replace(made, provenance=said)


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
    model = _model_of(spec, module.provenance.hidden_size)
    parsed = parse_vectors(spec, model, str(path))
    module.provenance.check_norms(norms_of({"base": parsed}), Source(str(path)))
    others = [one.op for one in parsed.entries if not one.only_adds]
    if others or parsed.generated is not None:
        first = others[0] if others else "all_generated"
        raise fail(
            f"path: {str(path)!r} has operations other than adding a vector to all "
            f"tokens ({first}); only additions can be used here",
            "path",
            first,
        )
    sums: dict[Tap, Vector] = {}
    for one in parsed.entries:
        vector = one.scaled(model, str(path))
        sums[one.tap] = sums[one.tap] + vector if one.tap in sums else vector
    return vector_set(sums, module.provenance, str(path))


def inner_point(name: Any) -> str | None:
    """The hook point inside a block that a key of vectors names, if it is one."""
    tap = parse_address(name) if isinstance(name, str) else None
    hook = tap[1] if tap is not None else hook_name(name)
    return hook if hook in INNER_POINTS else None


def _model_of(spec: Mapping[str, Any], hidden_size: int | None = None) -> SteeredModel:
    """A model that vectors fit if those of the stream have one width.

    Args:
        spec: `{hook: {layer: entry}}`, not checked.
        hidden_size: that of the stream, if known; by default that of the first vector.

    """
    inner: dict[str, tuple[int, int]] = {}
    for name, given in spec.items():
        hook = inner_point(name)
        if hook is not None:
            inner[hook] = (_first_width(given), 0)
        elif hidden_size is None:
            hidden_size = _first_width(given)
    every = {layer: HOOKS for layer in range(_MOST_LAYERS)}
    shapes = {layer: inner for layer in every}
    return SteeredModel(every, hidden_size or 0, torch.float32, shapes=shapes)


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
