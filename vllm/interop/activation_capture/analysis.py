# SPDX-License-Identifier: Apache-2.0
"""Readers of the files, with the names that vllm-activation-capture has for them.

Arrays are numpy's; with `device` given to `ActivationLoader` they are tensors there.
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
    """A manifest that a script has saved as JSON."""
    manifest: dict[str, Any] = json.loads(Path(manifest_path).read_text())
    return manifest


def load_activation_file(
    npz_path: str | Path, return_torch: bool = False, device: str | None = None
) -> dict[str, Any]:
    """The arrays of one file: `q`, `scale`, `zero`, or with `indices` and `values`."""
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
    """The coordinates `[tokens, K]` of a file's arrays, float32.

    Args:
        compressed_data: what `load_activation_file` gave.
        mode: not needed: the arrays say it.
        hidden_size: the model's; then rows `[tokens, hidden_size]` are returned. Of
            `rp8` these are projections onto the subspace. `topk8` needs it.
        rp_seed: what `VLLM_ACT_RP_SEED` was.

    Raises:
        ValueError: `topk8` without `hidden_size`.

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
    """Layer -> arrays of one sequence.

    Raises:
        FileNotFoundError: there is no such request.

    """
    return {
        layer: load_activation_file(path, return_torch, device)
        for sequence, layer, path in _files(Path(output_dir) / request_id)
        if sequence == int(sequence_id) and (layers is None or layer in layers)
    }


class ActivationLoader:
    """Reads the folder that `VLLM_ACT_OUTDIR` named.

    Args:
        output_dir: that folder.
        mode: `rp8`, `full8` or `topk8`; not needed, as files say it.
        device: where tensors are put; None gives numpy arrays.
        hidden_size: the model's; then activations are reconstructed in its space.

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
        """Requests that have files, by name."""
        folders = self.output_dir.glob("req_*")
        return sorted(folder.name for folder in folders if folder.is_dir())

    def load_request(
        self, request_id: str, reconstruct: bool = False
    ) -> dict[int, dict[int, Any]]:
        """`{sequence: {layer: arrays}}`, or values where `reconstruct` is true.

        Raises:
            FileNotFoundError: there is no such request.

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
        """How alike two arrays of one size are, over all their values.

        Args:
            acts1: of any shape.
            acts2: likewise.
            metric: `cosine`; `l2`, the negative distance; `correlation`, Pearson's.

        Raises:
            ValueError: there is no such metric, or the sizes differ.

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
        """The values `[tokens, K]` of a layer, a row per token.

        Raises:
            ValueError: the sequence has no such layer.

        """
        if layer not in sequence_activations:
            raise ValueError(
                f"layer {layer} is not there; there are {sorted(sequence_activations)}"
            )
        return self._values(sequence_activations[layer])

    def compute_layer_statistics(
        self, sequence_activations: Mapping[int, Any]
    ) -> dict[int, dict[str, float]]:
        """Layer -> `mean`, `std`, `min`, `max` and `norm` over all its values."""
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
    """A layer of a request's first sequence.

    Args:
        output_dir: what `VLLM_ACT_OUTDIR` named.
        request_id: None is the first request by name.
        layer: which layer.
        reconstruct: whether to return values `[tokens, K]` rather than the arrays.

    Raises:
        ValueError: there is no request, or it has no such layer.

    """
    loader = ActivationLoader(output_dir)
    names = loader.list_requests() if request_id is None else [request_id]
    if not names:
        raise ValueError(f"{str(output_dir)!r} holds no requests")
    sequences = loader.load_request(names[0])
    layers = sequences[min(sequences)] if sequences else {}
    if layer not in layers:
        raise ValueError(f"layer {layer} is not there; there are {sorted(layers)}")
    return loader.create_token_timeline(layers, layer) if reconstruct else layers[layer]


def compare_tokens(
    acts1: Values,
    acts2: Values,
    token_idx1: int = 0,
    token_idx2: int = 0,
    metric: str = "cosine",
) -> float:
    """`compute_similarity` of one row of each `[tokens, K]`.

    Raises:
        ValueError: they have other than two dimensions.

    """
    if len(acts1.shape) != 2 or len(acts2.shape) != 2:
        raise ValueError(
            f"need [tokens, K] twice, got {list(acts1.shape)}, {list(acts2.shape)}"
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
