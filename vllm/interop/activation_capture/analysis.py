# SPDX-License-Identifier: Apache-2.0
"""Readers of the files, with vllm-activation-capture's function names.

Arrays are numpy arrays, or tensors if `device` is passed to `ActivationLoader`.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm.interop.activation_capture.encoding import dequantize, restore

Values = np.ndarray[Any, Any] | torch.Tensor

_FILE = re.compile(r"seq(\d+)_layer(\d+)_rank(\d+)\.npz")
METRICS = ("cosine", "l2", "correlation")


def load_activation_manifest(manifest_path: str | Path) -> dict[str, Any]:
    """Load a manifest that a script has saved as JSON."""
    manifest: dict[str, Any] = json.loads(Path(manifest_path).read_text())
    return manifest


def load_activation_file(
    npz_path: str | Path, return_torch: bool = False, device: str | None = None
) -> dict[str, Any]:
    """Load one file's arrays: `q`, `scale`, `zero`, or with `indices` and `values`."""
    with np.load(npz_path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    if not return_torch:
        return arrays
    return {name: _placed(array, device) for name, array in arrays.items()}


def reconstruct_activations(
    compressed_data: Mapping[str, Any],
    mode: str | None = None,
    hidden_size: int | None = None,
    rp_seed: int = 12345,
) -> Values:
    """Decode a file's arrays to coordinates `[tokens, K]`, float32.

    Args:
        compressed_data: the result of `load_activation_file`.
        mode: ignored; the arrays determine the mode.
        hidden_size: the model's hidden size; if given, rows `[tokens, hidden_size]` are
            returned. For `rp8` these are projections onto the subspace. `topk8` needs
            it.
        rp_seed: the value of `VLLM_ACT_RP_SEED`.

    Raises:
        ValueError: the file is `topk8` and `hidden_size` is missing.

    """
    del mode
    first = next(iter(compressed_data.values()))
    arrays = {name: _numpy(array) for name, array in compressed_data.items()}
    if hidden_size is None and "indices" in arrays:
        raise ValueError(
            "topk8 keeps a part of each row: give hidden_size, the model's width, or "
            "read `indices` and `values` as they are"
        )
    values = (
        dequantize(arrays)
        if hidden_size is None
        else restore(arrays, hidden_size, rp_seed)
    )
    return _placed(values, first.device) if torch.is_tensor(first) else values


def load_sequence_activations(
    output_dir: str | Path,
    request_id: str,
    sequence_id: int | str = 0,
    layers: Sequence[int] | None = None,
    return_torch: bool = False,
    device: str | None = None,
) -> dict[int, dict[str, Any]]:
    """Load the arrays of one sequence, by layer.

    Raises:
        FileNotFoundError: the request has no files.

    """
    return {
        layer: load_activation_file(path, return_torch, device)
        for sequence, layer, path in _files(Path(output_dir) / request_id)
        if sequence == int(sequence_id) and (layers is None or layer in layers)
    }


class ActivationLoader:
    """Reads the folder in `VLLM_ACT_OUTDIR`.

    Args:
        output_dir: the folder.
        mode: ignored; files contain their mode (`rp8`, `full8` or `topk8`).
        device: device of returned tensors; None returns numpy arrays.
        hidden_size: the model's hidden size; if given, activations are reconstructed in
            its space.

    """

    def __init__(
        self,
        output_dir: str | Path,
        mode: str = "rp8",
        device: str | None = None,
        hidden_size: int | None = None,
    ) -> None:
        self.output_dir = Path(output_dir)
        self.mode = mode
        self.device = device
        self.hidden_size = hidden_size

    def list_requests(self) -> list[str]:
        """Names of the requests with files."""
        folders = self.output_dir.glob("req_*")
        return sorted(folder.name for folder in folders if folder.is_dir())

    def load_request(
        self, request_id: str, reconstruct: bool = False
    ) -> dict[int, dict[int, Any]]:
        """Load `{sequence: {layer: arrays}}`, or values if `reconstruct` is true.

        Raises:
            FileNotFoundError: the request has no files.

        """
        sequences: dict[int, dict[int, Any]] = {}
        for sequence, layer, path in _files(self.output_dir / request_id):
            data: Any = load_activation_file(
                path, return_torch=self.device is not None, device=self.device
            )
            sequences.setdefault(sequence, {})[layer] = (
                self._values(data) if reconstruct else data
            )
        return sequences

    def compute_similarity(
        self, acts1: Values, acts2: Values, metric: str = "cosine"
    ) -> float:
        """The similarity of two arrays of one size, over all their values.

        Args:
            acts1: an array of any shape.
            acts2: an array of the same size.
            metric: `cosine`; `l2`, the negative distance; or `correlation`, Pearson's.

        Raises:
            ValueError: the metric is unknown, or the sizes differ.

        """
        one, other = _numpy(acts1).ravel(), _numpy(acts2).ravel()
        one, other = one.astype(np.float64), other.astype(np.float64)
        if one.size != other.size:
            raise ValueError(f"{one.size} values and {other.size} cannot be compared")
        if metric == "l2":
            return -float(np.linalg.norm(one - other))
        if metric not in METRICS:
            raise ValueError(f"metric={metric!r}: use one of {list(METRICS)}")
        if metric == "correlation":
            one, other = one - one.mean(), other - other.mean()
        lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
        return float(one @ other) / lengths if lengths else 0.0

    def create_token_timeline(
        self, sequence_activations: Mapping[int, Any], layer: int = 0
    ) -> Values:
        """The values `[tokens, K]` of a layer, one row per token.

        Raises:
            ValueError: the sequence does not have this layer.

        """
        if layer not in sequence_activations:
            raise ValueError(
                f"layer {layer} is missing; the layers are "
                f"{sorted(sequence_activations)}"
            )
        return self._values(sequence_activations[layer])

    def compute_layer_statistics(
        self, sequence_activations: Mapping[int, Any]
    ) -> dict[int, dict[str, float]]:
        """`mean`, `std`, `min`, `max` and `norm` over all values, by layer."""
        return {
            layer: _statistics(_numpy(self._values(data)))
            for layer, data in sequence_activations.items()
        }

    def _values(self, data: Any) -> Values:
        if not isinstance(data, Mapping):
            values: Values = data
            return values
        return reconstruct_activations(data, hidden_size=self.hidden_size)


def quick_load(
    output_dir: str | Path,
    request_id: str | None = None,
    layer: int = 0,
    reconstruct: bool = True,
) -> Any:
    """Load one layer of a request's first sequence.

    Args:
        output_dir: the folder in `VLLM_ACT_OUTDIR`.
        request_id: the request's name; None for the first one.
        layer: the layer's index.
        reconstruct: whether to return values `[tokens, K]` rather than the arrays.

    Raises:
        ValueError: there is no request, or it does not have this layer.

    """
    loader = ActivationLoader(output_dir)
    names = loader.list_requests() if request_id is None else [request_id]
    if not names:
        raise ValueError(f"{str(output_dir)!r} holds no requests")
    sequences = loader.load_request(names[0])
    layers = sequences[min(sequences)] if sequences else {}
    if layer not in layers:
        raise ValueError(f"layer {layer} is missing; the layers are {sorted(layers)}")
    return loader.create_token_timeline(layers, layer) if reconstruct else layers[layer]


def compare_tokens(
    acts1: Values,
    acts2: Values,
    token_idx1: int = 0,
    token_idx2: int = 0,
    metric: str = "cosine",
) -> float:
    """The similarity of one row of each array `[tokens, K]`; see `compute_similarity`.

    Raises:
        ValueError: an array does not have two dimensions.

    """
    if len(acts1.shape) != 2 or len(acts2.shape) != 2:
        raise ValueError(
            f"two [tokens, K] needed, got {list(acts1.shape)}, {list(acts2.shape)}"
        )
    loader = ActivationLoader(".")
    return loader.compute_similarity(acts1[token_idx1], acts2[token_idx2], metric)


def _files(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """`(sequence, layer, path)` of a request's files, in ascending order."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no request {str(folder)!r}")
    found = []
    for path in folder.iterdir():
        if match := _FILE.fullmatch(path.name):
            found.append((int(match[1]), int(match[2]), path))
    yield from sorted(found)


def _statistics(values: np.ndarray[Any, Any]) -> dict[str, float]:
    if not values.size:
        return dict.fromkeys(("mean", "std", "min", "max", "norm"), float("nan"))
    return {
        "mean": float(values.mean()),
        "std": float(values.std()),
        "min": float(values.min()),
        "max": float(values.max()),
        "norm": float(np.linalg.norm(values)),
    }


def _numpy(values: Any) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = (
        values.cpu().numpy() if torch.is_tensor(values) else np.asarray(values)
    )
    return array


def _placed(array: np.ndarray[Any, Any], device: Any) -> torch.Tensor:
    return torch.from_numpy(array).to(device or "cpu")
