# SPDX-License-Identifier: Apache-2.0
"""Readout modules: probes, translators and SAEs that an operator registers by name.

A probe or translator file is a safetensors file with these metadata and tensors:

- metadata: `format` is `clearbox-readout-v1`, `kind` is `probe` or `translator`,
  `model` and `weights` have the meaning that they have in steering files, and, where
  they apply,
  `layer`, `hook`, `activation`, `cosine` and `residual`;
- a probe: `vectors` `[k, hidden_size]`, optionally `bias` `[k]` and `threshold` `[k]`;
- a translator: for each layer L `L.weight` `[hidden_size, hidden_size]` and optionally
  `L.bias` `[hidden_size]`. It maps a row x to `weight @ x + bias`, plus x if `residual`
  is true, as in a tuned lens (arXiv 2303.08112). A Jacobian lens is the matrix alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from vllm.v1.readouts.errors import fail
from vllm.v1.residual.array_files import read_metadata
from vllm.v1.residual.file_facts import split_facts
from vllm.v1.residual.model_identity import ModelIdentity
from vllm.v1.residual.module_info import ModuleInfo
from vllm.v1.residual.numbers import layer_index
from vllm.v1.residual.sae import SparseAutoencoder, load_sae
from vllm.v1.residual.sae.files import SAEFileError
from vllm.v1.residual.sae.load import FILES as SAE_FILES
from vllm.v1.residual.sae.record import fingerprint_of
from vllm.v1.residual.tap import HOOK_NAMES, Tap, hook_name, why_not

FORMAT = "clearbox-readout-v1"


ACTIVATIONS = ("none", "relu", "sigmoid", "softmax", "jumprelu")
MAX_VECTORS = 4096
"""Most vectors of one probe."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ProbeModule:
    """A linear probe: `activation(rows @ vectors.T + bias)`.

    With `cosine`, rows and vectors are normalised to length 1 first.
    """

    vectors: torch.Tensor  # [k, hidden_size], float32
    bias: torch.Tensor  # [k], float32
    threshold: torch.Tensor | None = None  # [k], float32
    activation: str = "none"
    cosine: bool = False

    def fingerprint(self) -> str:
        """SHA-256 of everything that determines the values."""
        parts = (self.vectors, self.bias, self.threshold)
        tensors = [tensor for tensor in parts if tensor is not None]
        return fingerprint_of((self.activation, self.cosine), tensors)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TranslatorModule:
    """A linear map per layer, by layer; see the module's docstring."""

    weights: Mapping[int, torch.Tensor]  # [hidden_size, hidden_size]
    biases: Mapping[int, torch.Tensor]  # [hidden_size]
    residual: bool = False

    def fingerprint(self) -> str:
        """SHA-256 of everything that determines the values."""
        said = self.residual, sorted(self.weights), sorted(self.biases)
        both = (*sorted(self.weights.items()), *sorted(self.biases.items()))
        return fingerprint_of(said, [tensor for _, tensor in both])


Module: TypeAlias = ProbeModule | TranslatorModule | SparseAutoencoder


def load_module(name: str, path: str, tap: Tap | None = None) -> Module:
    """Load a module from a file or folder to the CPU.

    Args:
        name: used in error messages.
        path: a probe or translator file, or an SAE in a supported layout.
        tap: `(layer, hook)` for an SAE that does not state its own.

    Raises:
        ReadoutValidationError: the file is invalid.

    """
    try:
        file, facts = split_facts(path)
        if file.suffix == ".safetensors" and file.is_file():
            module = _from_safetensors(file)
            if module is not None and facts:
                raise fail(
                    f"{name}: {facts!r} after the path is for SAEs; the file of a "
                    "probe or translator has all its facts, so leave it out",
                    "path",
                    path,
                )
            if module is not None:
                return module
            if file.name not in SAE_FILES:
                raise fail(
                    f"{name}: its metadata does not say format={FORMAT!r}, as that of "
                    "probes and translators does, and it is no file of an SAE; save a "
                    "probe with save_probe or vllm probe train",
                    "path",
                    path,
                )
        return load_sae(path, tap)
    except (SAEFileError, _Invalid) as error:
        raise fail(f"{name}: {error.args[0]}", "path", path) from None
    except OSError as error:  # No permission, or no name that a file can have.
        why = error.strerror or type(error).__name__
        raise fail(f"path cannot be read: {why}", "path", path) from None


def describe_module(name: str, path: str, module: Module) -> ModuleInfo:
    """Describe a loaded module.

    Args:
        name: the name that it is registered under.
        path: where it was loaded from.
        module: the loaded module.

    """
    info = partial(ModuleInfo, name=name, path=path, fingerprint=module.fingerprint())
    if isinstance(module, SparseAutoencoder):
        return info(
            kind="sae",
            width=module.d_in,
            size=module.d_sae,
            tap=module.reads.tap,
            model=module.model,
            selection=module.selection,
            active=module.k,
            is_transcoder=module.is_transcoder,
            writes=module.writes.tap,
            width_out=module.d_out,
        )
    said = read_metadata(Path(path))
    info = partial(info, **{key: said.get(key, "") for key in ("model", "weights")})
    if isinstance(module, ProbeModule):
        return info(
            kind="probe",
            width=int(module.vectors.shape[1]),
            size=int(module.vectors.shape[0]),
            tap=_tap(said),
        )
    layers = tuple(sorted(module.weights))
    width = int(module.weights[layers[0]].shape[0])
    return info(kind="translator", width=width, size=len(layers), layers=layers)


def check_model(info: ModuleInfo, identity: ModelIdentity) -> None:
    """Refuse a probe or translator that was made for another model.

    The names in files of SAEs are their authors', who know no other copies of the
    model: for these only width and place are checked.

    Raises:
        ReadoutValidationError: the message names both models, and the remedy.

    """
    if info.kind == "sae" or not info.model:
        return
    if differs := identity.differs(info.model, info.weights):
        also = " with other weights" if differs == "weights" else ""
        raise fail(
            f"{info.name}: the {info.kind} was made for the model {info.model!r}, this "
            f"is {identity.title!r}{also}; make one for this model (vllm probe train), "
            "or, to use it as it is, remove `model` and `weights` from the file's "
            "metadata",
            "path",
            info.model,
        )


def check_place(info: ModuleInfo, points: Mapping[int, Sequence[str]]) -> None:
    """Refuse a module for a layer or a hook point that the model does not have.

    Args:
        info: the module.
        points: the hook points of each layer, as far as they are known.

    Raises:
        ReadoutValidationError: naming the place and those that there are.

    """
    layers = set(info.layers)
    if info.tap is not None:
        layer, hook = info.tap
        if hook in points.get(layer, ()):
            return
        names = sorted({point for own in points.values() for point in own})
        what = "SAE" if info.kind == "sae" else info.kind
        raise fail(
            f"{info.name}: this {what} reads {hook} of layer {layer}, which is not "
            f"a hook point of this model; it has {names} at layers {min(points)} to "
            f"{max(points)}{why_not(hook)}",
            "path",
            f"{hook}.{layer}",
        )
    if lacking := sorted(layers - points.keys()):
        raise fail(
            f"{info.name}: it has maps for the layers {lacking}, and this model has "
            f"the layers {min(points)} to {max(points)}; is it of another model?",
            "path",
            lacking[0],
        )


def save_probe(
    path: str | Path,
    vectors: Any,
    bias: Any = None,
    *,
    layer: int | None = None,
    hook: str = "post_block",
    activation: str = "none",
    cosine: bool = False,
    threshold: Any = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a probe file. Tensors, arrays and numbers are stored in float32.

    Args:
        path: the file to write, ending in `.safetensors`.
        vectors: `[k, hidden_size]`, or `[hidden_size]`.
        bias: `[k]`, or a number.
        layer: the 0-based layer that the probe reads by default.
        hook: the hook point of that layer.
        activation: `none`, `relu`, `sigmoid`, `softmax` or `jumprelu`.
        cosine: whether rows and vectors are normalised to length 1 first.
        threshold: `[k]`, required for `jumprelu`.
        metadata: further metadata, such as `model`.

    """
    tensors = {"vectors": torch.atleast_2d(_float32(vectors))}
    if bias is not None:
        tensors["bias"] = torch.atleast_1d(_float32(bias))
    if threshold is not None:
        tensors["threshold"] = torch.atleast_1d(_float32(threshold))
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
    """Write a translator file. Tensors keep their dtype.

    Args:
        path: the file to write, ending in `.safetensors`.
        weights: `[hidden_size, hidden_size]` by 0-based layer.
        biases: `[hidden_size]` by layer.
        residual: whether the row is added to the mapped row.
        metadata: further metadata, such as `model`.

    """
    tensors = {f"{layer}.weight": one.contiguous() for layer, one in weights.items()}
    tensors |= {f"{k}.bias": one.contiguous() for k, one in (biases or {}).items()}
    said = {"kind": "translator", "residual": str(residual).lower()}
    _save(path, tensors, said, metadata)


def _float32(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.float32).contiguous()


def _save(
    path: str | Path,
    tensors: Mapping[str, torch.Tensor],
    said: Mapping[str, str],
    metadata: Mapping[str, str] | None,
) -> None:
    from safetensors.torch import save

    # `save_file` would create a file that only its owner can read.
    whole = {**(metadata or {}), **said, "format": FORMAT}
    Path(path).write_bytes(save(dict(tensors), metadata=whole))


_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _tap(said: Mapping[str, str]) -> Tap | None:
    """The place in a file's metadata, which `_check_said` has checked."""
    if "layer" not in said:
        return None
    hook = hook_name(said.get("hook", "post_block"))
    assert hook is not None, "the metadata was not checked"
    return int(said["layer"]), hook


class _Invalid(Exception):
    """A file of a probe or translator is invalid, see the message."""


def _check_said(said: Mapping[str, str]) -> None:
    """Refuse metadata that would otherwise be ignored.

    Raises:
        _Invalid: naming the entry and what it may be.

    """
    hook = said.get("hook", "post_block")
    wrong = {
        "layer": "layer" in said and layer_index(said["layer"]) is None,
        "hook": hook_name(hook) is None or ("hook" in said and "layer" not in said),
        **{
            flag: said.get(flag, "true") not in ("true", "false")
            for flag in ("cosine", "residual")
        },
    }
    for entry in (entry for entry, is_wrong in wrong.items() if is_wrong):
        raise _Invalid(
            f"the metadata's {entry} {said.get(entry)!r} has no meaning; layer "
            f"is a 0-based index, hook one of {list(HOOK_NAMES)} and needs a layer, "
            "cosine and residual are true or false"
        )


def _from_safetensors(path: Path) -> Module | None:
    """A probe or a translator; None if the file has another format."""
    from safetensors.torch import load_file

    try:
        said = read_metadata(path)
    except ValueError as error:
        what = f"path: {str(path)!r} is not a safetensors file: {error}"
        raise fail(what, "path", str(path)) from None
    if said.get("format") != FORMAT:
        return None
    tensors = load_file(path)
    for label, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise _Invalid(
                f"{label} is stored as {str(tensor.dtype)[6:]}; store it as "
                "float32, float16 or bfloat16"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise _Invalid(f"{label} holds NaN or infinity")
    kind = said.get("kind")
    _check_said(said)
    if kind == "probe":
        return _probe(said, tensors)
    if kind == "translator":
        return _translator(said, tensors)
    raise _Invalid(f"kind {kind!r} is not probe or translator")


def _probe(said: Mapping[str, str], tensors: dict[str, torch.Tensor]) -> ProbeModule:
    vectors = tensors.get("vectors")
    if vectors is None or vectors.ndim != 2 or not vectors.numel():
        raise _Invalid("it has no vectors [k, hidden_size]")
    if unknown := sorted(tensors.keys() - {"vectors", "bias", "threshold"}):
        raise _Invalid(
            f"{unknown[0]!r} is none of a probe's tensors vectors, bias and threshold"
        )
    k = vectors.shape[0]
    if k > MAX_VECTORS:
        raise _Invalid(
            f"it has {k} vectors, and a probe at most {MAX_VECTORS}; save them "
            "as several probes"
        )
    bias, threshold = tensors.get("bias"), tensors.get("threshold")
    for label, one in (("bias", bias), ("threshold", threshold)):
        if one is not None and tuple(one.shape) != (k,):
            raise _Invalid(f"{label} has the shape {list(one.shape)}, not [{k}]")
    activation = said.get("activation", "none")
    jumps = activation == "jumprelu"
    if activation not in ACTIVATIONS or jumps != (threshold is not None):
        raise _Invalid(
            f"the activation {activation!r} is none of {list(ACTIVATIONS)}, "
            "or jumprelu without thresholds, or another with them"
        )
    cosine = said.get("cosine") == "true"
    if cosine and not bool(vectors.any(dim=1).all()):
        raise _Invalid("a vector of zeros has no direction, which cosine needs")
    return ProbeModule(
        vectors=vectors.float(),
        bias=torch.zeros(k) if bias is None else bias.float(),
        threshold=None if threshold is None else threshold.float(),
        activation=activation,
        cosine=cosine,
    )


def _translator(
    said: Mapping[str, str], tensors: dict[str, torch.Tensor]
) -> TranslatorModule:
    weights: dict[int, torch.Tensor] = {}
    biases: dict[int, torch.Tensor] = {}
    for label, tensor in tensors.items():
        layer, _, part = label.partition(".")
        index = layer_index(layer)
        if index is None or part not in ("weight", "bias"):
            raise _Invalid(f"{label!r} is not named LAYER.weight or LAYER.bias")
        (weights if part == "weight" else biases)[index] = tensor
    shapes = {tuple(one.shape) for one in weights.values()}
    width = max((side for shape in shapes for side in shape), default=0)
    good = (
        bool(width) and shapes == {(width, width)} and biases.keys() <= weights.keys()
    )
    if not good or any(tuple(one.shape) != (width,) for one in biases.values()):
        raise _Invalid(
            f"weights must be square and of one width, and biases as wide; "
            f"the shapes are {sorted(shapes)}"
        )
    return TranslatorModule(
        weights=weights, biases=biases, residual=said.get("residual") == "true"
    )
