# SPDX-License-Identifier: Apache-2.0
"""The consumer that `VLLM_ACT_CAPTURE=1` adds: an `.npz` per sequence and layer."""

import base64
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from vllm.interop.activation_capture.encoding import (
    Array,
    Encoding,
    index_dtype,
    orthonormal_basis,
    quantize,
)
from vllm.interop.activation_capture.variables import NAME
from vllm.logger import init_logger
from vllm.v1.capture.consumers.storage.files import path_part, publish
from vllm.v1.capture.consumers.storage.options import Options
from vllm.v1.capture.consumers.storage.params import StorageParams
from vllm.v1.capture.consumers.storage.sink import StorageSink
from vllm.v1.capture.consumers.storage.stored_request import StoredRequest
from vllm.v1.capture.types import CaptureFinalize, CaptureResult
from vllm.v1.residual.plugin_errors import described

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

WHERE = f"capture_consumers.{NAME}"
HOOK = "post_block"
_WRITE_BYTES = 32 << 20

_SCALES = 2 * torch.float32.itemsize
"""Bytes of the scale and the zero of a row."""


@dataclass(frozen=True, slots=True)
class DeviceEncoder:
    """Encodes rows on the device, a `RowEncoder`; the host gets only its result.

    `rp8`    the coordinates of a row, float32 [K], with one scale per dimension
    others   a record of bytes: q or values [K], scale and zero (float32), and of
             `topk8` also the indices

    A scale per dimension is known only at the end of the sequence. Coordinates are
    therefore quantized on the host, where `full8` with such scales needs the whole
    rows.
    """

    encoding: Encoding
    count: int
    """K, the number of values that are kept of a row."""
    width: int
    """Values per encoded row."""
    dtype: torch.dtype
    """float32 for coordinates, uint8 for records."""
    indices: torch.dtype
    """The dtype of the indices of `topk8`."""
    basis: torch.Tensor | None
    """`[hidden_size, K]` float32 on the device, of `rp8`."""

    @classmethod
    def of(
        cls,
        encoding: Encoding,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "DeviceEncoder | None":
        """The encoder for rows `[n, hidden_size]` of `dtype`.

        None if they must be copied whole, or would not become smaller.
        """
        count = encoding.count(hidden_size)
        indices = index_dtype(hidden_size)
        if encoding.is_per_dim:
            if encoding.mode != "rp8":
                return None
            width, kind = count, torch.float32
        else:
            each = 1 + (indices.itemsize if encoding.mode == "topk8" else 0)
            width, kind = count * each + _SCALES, torch.uint8
        if width * kind.itemsize >= hidden_size * dtype.itemsize:
            return None
        basis = None
        if encoding.mode == "rp8":
            columns = orthonormal_basis(hidden_size, count, encoding.rp_seed)
            basis = torch.from_numpy(columns).to(device)
        return cls(encoding, count, width, kind, indices, basis)

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Encode rows `[n, hidden_size]` to `[n, width]`, on the same device."""
        values, kept = self.encoding.coordinates(rows, self.basis)
        if self.dtype is torch.float32:
            return values
        parts = [part.view(torch.uint8) for part in quantize(values, dim=1)]
        if kept is not None:
            parts.append(kept.view(torch.uint8))
        return torch.cat(parts, dim=1)

    @property
    def no_rows(self) -> torch.Tensor:
        """Encoded rows `[0, width]` on the host."""
        return torch.empty(0, self.width, dtype=self.dtype)

    def arrays(self, encoded: torch.Tensor) -> dict[str, Array]:
        """The result of `Encoding.encode`, from encoded rows `[n, width]`."""
        if self.dtype is torch.float32:
            return self.encoding.named(quantize(encoded, dim=0))
        ends = (self.count, self.count + 4, self.count + _SCALES)
        # Copies, as the bytes of a number must be aligned.
        q, scale, zero, kept = (
            part.clone(memory_format=torch.contiguous_format)
            for part in encoded.tensor_split(ends, dim=1)
        )
        numbers = q, scale.view(torch.float32), zero.view(torch.float32)
        indices = kept.view(self.indices) if self.encoding.mode == "topk8" else None
        return self.encoding.named(numbers, indices)


class ActivationFilesConsumer(StorageSink):
    """Writes the output of every layer, at all positions, of every request.

    Files are `{root}/req_{id}/seq{S}_layer{L}_rank0.npz` for sample S and layer L; of
    the ranks that share a layer, the first writes the whole stream. The result's
    payload is the manifest, or None if `return_mode` is `none`.
    """

    reads_client_spec: ClassVar[bool] = False
    metrics_key: ClassVar[str] = "activation_manifest"

    def __init__(self, vllm_config: "VllmConfig", params: dict[str, Any]) -> None:
        values = parsed(params, vllm_config)
        chosen = {n: values[n] for n in Encoding.__slots__ if n in values}
        self._encoding = Encoding(**{"mode": "rp8", **chosen})
        self._return_mode = values.get("return_mode", "metadata")
        parallel = None if vllm_config is None else vllm_config.parallel_config
        self._world_size = 1 if parallel is None else parallel.tensor_parallel_size
        self._encoder: DeviceEncoder | None = None
        """What has encoded the rows; None if they are whole."""
        shared = StorageParams(
            root=values["root"], global_hooks={HOOK: "all"}, global_positions="all"
        )
        super().__init__(NAME, vllm_config, shared)

    def row_encoder(
        self, width: int, dtype: torch.dtype, device: torch.device
    ) -> DeviceEncoder | None:
        """Encode rows on the device from now on, if fewer bytes then leave it."""
        self._encoder = DeviceEncoder.of(self._encoding, width, dtype, device)
        if self._encoder is not None:
            logger.info(
                "%s: rows of %d bytes are encoded on the device, and %d bytes of each "
                "are copied to the host",
                self._name,
                width * dtype.itemsize,
                self._encoder.width * self._encoder.dtype.itemsize,
            )
        return self._encoder

    def publish(self, request: StoredRequest, finalizes: list[CaptureFinalize]) -> None:
        """Write one file per layer; the manifest is the payload of the first key."""
        sidecar = finalizes[0].sidecar
        name = folder_name(sidecar)
        folder = self._workspace.folder(name)
        layers: dict[str, dict[str, Any]] = {}
        results = []
        for finalize in finalizes:
            try:
                layer = self._write(request, finalize, folder)
            except OSError as error:
                said = described(error)
                results.append(CaptureResult(finalize.key, "error", said))
            else:
                layers[str(finalize.key[1])] = layer
                results.append(CaptureResult(finalize.key, "ok"))
            if request.settled.is_set():  # abandoned, because it took too long
                return
        if self._return_mode != "none":
            results[0].payload = self._manifest(sidecar, name, folder, layers)
        request.settle(results)

    def _write(
        self, request: StoredRequest, finalize: CaptureFinalize, folder: Path
    ) -> dict[str, Any]:
        sidecar = finalize.sidecar
        arrays = self._arrays(list(request.blocks(finalize, _WRITE_BYTES)), sidecar)
        # Compression saves 4 % of 8-bit values and takes longer than encoding.
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)  # type: ignore[arg-type]  # its allow_pickle
        data = buffer.getvalue()
        file = f"seq{sidecar['sample_index']}_layer{sidecar['layer']}_rank0.npz"
        aside = self._workspace.write([data], _WRITE_BYTES, fsync=False)
        request.commit()
        publish(aside, folder / file, replace=True, fsync=False)
        shape = list((arrays["q"] if "q" in arrays else arrays["values"]).shape)
        layer: dict[str, Any] = {"path": file, "shape": shape}
        if self._return_mode == "compressed":
            layer["data"] = base64.b64encode(data).decode()
        return layer

    def _arrays(
        self, blocks: list[torch.Tensor], sidecar: dict[str, Any]
    ) -> dict[str, Array]:
        encoder = self._encoder
        if encoder is not None:
            return encoder.arrays(torch.cat([encoder.no_rows, *blocks]))
        dtype = getattr(torch, sidecar["dtype"])
        empty = torch.empty(0, sidecar["hidden_size"], dtype=dtype)
        return self._encoding.encode(torch.cat(blocks) if blocks else empty)

    def _manifest(
        self,
        sidecar: dict[str, Any],
        name: str,
        folder: Path,
        layers: dict[str, dict[str, Any]],
    ) -> dict[str, Any]:
        sequence = {
            "prompt_len": sidecar["num_prompt_tokens"],
            "total_len": sidecar["num_rows"],
            "positions": list(sidecar["positions"]),
            "token_ids": list(sidecar["token_ids"]),
            "layers": layers,
        }
        return {
            "request_id": name,
            "tp_rank": 0,
            "tp_world_size": self._world_size,
            "mode": self._encoding.mode,
            "return_mode": self._return_mode,
            "compression": self._encoding.describe(),
            "hidden_size": sidecar["hidden_size"],
            "model": sidecar["model"],
            "output_dir": str(folder),
            "sequences": {str(sidecar["sample_index"]): sequence},
        }


def parsed(raw: dict[str, Any], config: "VllmConfig | None") -> dict[str, Any]:
    """Check parameters that `variables.consumer_of` created.

    Raises:
        CaptureValidationError: the message names the parameter, the value and the
            remedy.

    """
    numbers = ("rp_k", "topk_k", "hidden_size")
    names = ("root", "mode", "rp_seed", "per_dim_scale", "return_mode", *numbers)
    options = Options(WHERE, raw, names)
    options.root("root", "VLLM_ACT_OUTDIR=/data/activations")
    options.choice("mode", ("rp8", "full8", "topk8"))
    options.choice("return_mode", ("metadata", "none", "compressed"))
    options.boolean("per_dim_scale")
    for name in numbers:
        options.whole(name, optional=name == "hidden_size")
    values = options.values
    if config is not None:
        width = config.model_config.get_hidden_size()
        if values.get("hidden_size", width) != width:
            raise options.wrong(
                "hidden_size", values["hidden_size"], f"the model has {width}"
            )
        stages = config.parallel_config.pipeline_parallel_size
        if stages > 1:
            raise options.wrong(
                "root",
                raw["root"],
                f"the model has {stages} pipeline stages, and a manifest covers one; "
                "use --capture-consumers filesystem:root=DIR instead",
            )
    return values


def folder_name(sidecar: dict[str, Any]) -> str:
    """`req_` and the request's internal id, which all of its samples share."""
    request_id = str(sidecar["vllm_internal_request_id"])
    if sidecar["num_samples"] > 1:
        # Upstream prefixes a sample's index to the id of its request.
        request_id = request_id.removeprefix(f"{sidecar['sample_index']}_")
    return path_part(f"req_{request_id}"[:200], f"{WHERE}.request_id")
