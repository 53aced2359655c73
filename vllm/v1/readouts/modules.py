# SPDX-License-Identifier: Apache-2.0
"""Named modules: probes, translators and SAEs that an operator puts on a server.

A file of probes or of a translator is safetensors with metadata:

- `format` `clearbox-readout-v1`, `kind` `probe` or `translator`, `model` (what steering
  files say of theirs) and, as they apply, `layer`, `hook`, `activation`, `cosine`,
  `residual`;
- a probe: `vectors` `[k, hidden_size]`, and `bias` `[k]`, `threshold` `[k]` if there
  are any;
- a translator: for each layer L `L.weight` `[hidden_size, hidden_size]` and, if there
  is one, `L.bias` `[hidden_size]`. The row x becomes `weight @ x + bias`, and x more
  where `residual` is true, as in a tuned lens (arXiv 2303.08112); a Jacobian lens is
  the matrix alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from vllm.steering.sae import SparseAutoencoder, load_sae
from vllm.v1.readouts.errors import fail
from vllm.v1.readouts.plan import Tap
from vllm.v1.steering.errors import SteeringValidationError

FORMAT = "clearbox-readout-v1"

ModuleKind: TypeAlias = Literal["probe", "translator", "sae"]

ACTIVATIONS = ("none", "relu", "sigmoid", "softmax", "jumprelu")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleInfo:
    """What a front end must know of a module; the weights are the workers'."""

    name: str
    kind: ModuleKind
    path: str
    width: int
    """Of the rows that it takes."""
    size: int
    """Values of a probe, features of an SAE, layers of a translator."""
    tap: Tap | None = None
    """The place that it was made for, if it says one."""
    layers: tuple[int, ...] = ()
    """Of a translator."""
    model: str = ""
    """The model that it names; empty if it names none."""
    selection: str = ""
    """Of an SAE."""
    active: int | None = None
    """Features of a row that are active, of an SAE that fixes their number."""

    def describe(self) -> dict[str, Any]:
        """As plain data, without the path."""
        said: dict[str, Any] = {"kind": self.kind, "width": self.width}
        said["features" if self.kind == "sae" else "size"] = self.size
        if self.tap is not None:
            said |= {"layer": self.tap[0], "hook": self.tap[1]}
        if self.layers:
            said["layers"] = list(self.layers)
        if self.kind == "sae":
            said |= {"selection": self.selection, "k": self.active}
        return said | ({"model": self.model} if self.model else {})


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ProbeModule:
    """Directions with what is done to their products."""

    vectors: torch.Tensor  # [k, hidden_size], float32
    bias: torch.Tensor  # [k], float32
    threshold: torch.Tensor | None = None  # [k], float32
    activation: str = "none"
    cosine: bool = False


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TranslatorModule:
    """A linear map per layer."""

    weights: Mapping[int, torch.Tensor]  # [hidden_size, hidden_size]
    biases: Mapping[int, torch.Tensor]  # [hidden_size]
    residual: bool = False


Module: TypeAlias = ProbeModule | TranslatorModule | SparseAutoencoder


def load_module(name: str, path: str, tap: Tap | None = None) -> Module:
    """What a file or folder holds, on the CPU.

    Args:
        name: for messages.
        path: a safetensors file of readouts, or an SAE of a known layout.
        tap: the place of an SAE that does not say its own.

    Raises:
        ReadoutValidationError: it is not what it says.

    """
    if Path(path).suffix == ".safetensors" and Path(path).is_file():
        module = _from_safetensors(name, Path(path))
        if module is not None:
            return module
    try:
        return load_sae(path, tap)
    except SteeringValidationError as error:
        raise fail(f"{name}: {error}", name, path) from None


def describe_module(
    name: str, path: str, module: Module, metadata: Mapping[str, str] | None = None
) -> ModuleInfo:
    """What a front end must know of a loaded module."""
    if isinstance(module, SparseAutoencoder):
        return ModuleInfo(
            name=name,
            kind="sae",
            path=path,
            width=module.d_in,
            size=module.d_sae,
            tap=module.reads.tap,
            model=module.model,
            selection=module.selection,
            active=module.k,
        )
    said = read_metadata(Path(path)) if metadata is None else metadata
    model = said.get("model", "")
    if isinstance(module, ProbeModule):
        return ModuleInfo(
            name=name,
            kind="probe",
            path=path,
            width=int(module.vectors.shape[1]),
            size=int(module.vectors.shape[0]),
            tap=_tap(said),
            model=model,
        )
    layers = tuple(sorted(module.weights))
    return ModuleInfo(
        name=name,
        kind="translator",
        path=path,
        width=int(module.weights[layers[0]].shape[0]),
        size=len(layers),
        layers=layers,
        model=model,
    )


def save_probe(
    path: str | Path,
    vectors: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    layer: int | None = None,
    hook: str = "post_block",
    activation: str = "none",
    cosine: bool = False,
    threshold: torch.Tensor | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a file of probes.

    Args:
        path: ends in `.safetensors`.
        vectors: `[k, hidden_size]`.
        bias: `[k]`.
        layer: where the probe reads, if it has one place.
        hook: the hook point there.
        activation: `none`, `relu`, `sigmoid`, `softmax` or `jumprelu`.
        cosine: whether rows and vectors are brought to length 1 first.
        threshold: `[k]`, for `jumprelu`.
        metadata: for people, and `model`.

    """
    tensors = {"vectors": vectors.float().contiguous()}
    if bias is not None:
        tensors["bias"] = bias.float().contiguous()
    if threshold is not None:
        tensors["threshold"] = threshold.float().contiguous()
    said = {"kind": "probe", "activation": activation, "cosine": str(cosine).lower()}
    if layer is not None:
        said |= {"layer": str(layer), "hook": hook}
    _save(path, tensors, said, metadata)


def save_translator(
    path: str | Path,
    weights: Mapping[int, torch.Tensor],
    biases: Mapping[int, torch.Tensor] | None = None,
    *,
    residual: bool = False,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a translator: a linear map `[hidden_size, hidden_size]` per layer."""
    tensors = {f"{layer}.weight": one.contiguous() for layer, one in weights.items()}
    tensors |= {f"{k}.bias": one.contiguous() for k, one in (biases or {}).items()}
    said = {"kind": "translator", "residual": str(residual).lower()}
    _save(path, tensors, said, metadata)


def _save(
    path: str | Path,
    tensors: Mapping[str, torch.Tensor],
    said: Mapping[str, str],
    metadata: Mapping[str, str] | None,
) -> None:
    from safetensors.torch import save

    # Not `save_file`, whose files only their owner may read.
    whole = {**(metadata or {}), **said, "format": FORMAT}
    Path(path).write_bytes(save(dict(tensors), metadata=whole))


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file; empty where there is none."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            return dict(opened.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise fail(
            f"path: {path.name!r} is no safetensors file: {error}", "path", str(path)
        ) from None


def _tap(said: Mapping[str, str]) -> Tap | None:
    layer = said.get("layer", "")
    return (int(layer), said.get("hook", "post_block")) if layer.isdigit() else None


def _from_safetensors(name: str, path: Path) -> Module | None:
    """A probe or a translator; None where the file is no file of readouts."""
    from safetensors.torch import load_file

    said = read_metadata(path)
    if said.get("format") != FORMAT:
        return None
    tensors = load_file(path)
    for label, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise fail(f"{name}: {label} holds NaN or infinity", name, str(path))
    kind = said.get("kind")
    if kind == "probe":
        return _probe(name, path, said, tensors)
    if kind == "translator":
        return _translator(name, path, said, tensors)
    raise fail(f"{name}: kind {kind!r} is not probe or translator", name, str(path))


def _probe(
    name: str, path: Path, said: Mapping[str, str], tensors: dict[str, torch.Tensor]
) -> ProbeModule:
    vectors = tensors.get("vectors")
    if vectors is None or vectors.ndim != 2 or not vectors.numel():
        raise fail(f"{name}: it has no vectors [k, hidden_size]", name, str(path))
    k = vectors.shape[0]
    bias, threshold = tensors.get("bias"), tensors.get("threshold")
    for label, one in (("bias", bias), ("threshold", threshold)):
        if one is not None and tuple(one.shape) != (k,):
            raise fail(
                f"{name}: {label} has the shape {list(one.shape)}, not [{k}]",
                name,
                str(path),
            )
    activation = said.get("activation", "none")
    if activation not in ACTIVATIONS or (
        activation == "jumprelu" and threshold is None
    ):
        raise fail(
            f"{name}: the activation {activation!r} is none of {list(ACTIVATIONS)}, "
            "or jumprelu without thresholds",
            name,
            str(path),
        )
    return ProbeModule(
        vectors=vectors.float(),
        bias=torch.zeros(k) if bias is None else bias.float(),
        threshold=None if threshold is None else threshold.float(),
        activation=activation,
        cosine=said.get("cosine") == "true",
    )


def _translator(
    name: str, path: Path, said: Mapping[str, str], tensors: dict[str, torch.Tensor]
) -> TranslatorModule:
    weights: dict[int, torch.Tensor] = {}
    biases: dict[int, torch.Tensor] = {}
    for label, tensor in tensors.items():
        layer, _, part = label.partition(".")
        if not layer.isdigit() or part not in ("weight", "bias"):
            raise fail(
                f"{name}: {label!r} is not named LAYER.weight or LAYER.bias",
                name,
                str(path),
            )
        (weights if part == "weight" else biases)[int(layer)] = tensor
    shapes = {tuple(one.shape) for one in weights.values()}
    width = next(iter(shapes))[0] if shapes else 0
    good = shapes == {(width, width)} and biases.keys() <= weights.keys()
    if not good or any(tuple(one.shape) != (width,) for one in biases.values()):
        raise fail(
            f"{name}: weights must be square and of one width, and biases as wide; "
            f"the shapes are {sorted(shapes)}",
            name,
            str(path),
        )
    return TranslatorModule(
        weights=weights, biases=biases, residual=said.get("residual") == "true"
    )
