# SPDX-License-Identifier: Apache-2.0
"""The record of a sparse autoencoder, independent of its file's layout."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from vllm.v1.residual.sae.files import SAEFileError, fail
from vllm.v1.residual.tap import Tap

Selection: TypeAlias = Literal["threshold", "topk", "abstopk", "groupmax"]
"""How active features of a row are selected: those above a threshold, the k largest,
the k largest in absolute value (signs kept), or the largest of each of k equal
groups."""

InputNorm: TypeAlias = Literal["none", "constant_norm_rescale", "layer_norm"]
"""Normalisations of a row before encoding that cannot be folded, in SAELens' terms:
none, `x * sqrt(d_in) / |x|`, or `(x - mean) / (std + 1e-5)`."""


@dataclass(frozen=True, slots=True)
class SAEPlace:
    """The place at which an SAE reads or writes."""

    name: str = ""
    """The file's own name of the place; empty if it has none."""
    tap: Tap | None = None
    """The place as `(layer, hook point)`; None if it is not one of our hook points."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False, kw_only=True)
class SparseAutoencoder:
    """An encoder and a decoder, with every foldable convention folded in.

    For a row x `[d_in]`, normalised according to `input_norm`:
    """

    name: str
    """Name of the file or folder."""
    layout: str
    """Layout of the file, such as `saelens` or `gemma_scope`."""
    w_enc: torch.Tensor
    """The encoder, `[d_in, d_sae]`."""
    b_enc: torch.Tensor
    """The encoder's bias, float32 `[d_sae]`, with the subtraction of the decoder's bias
    folded in."""
    w_dec: torch.Tensor
    """The decoder, `[d_sae, d_out]`, in units of the row that is read or written."""
    b_dec: torch.Tensor
    """The decoder's bias, float32 `[d_out]`."""
    selection: Selection
    threshold: torch.Tensor | None = None
    """Thresholds, float32 `[d_sae]`, for the selection `threshold`: active is `h >
    threshold`."""
    k: int | None = None
    """Number of active features of a row, for the other selections."""
    input_norm: InputNorm = "none"
    w_skip: torch.Tensor | None = None
    """The matrix `[d_in, d_out]` of a skip transcoder, whose product is added to the
    output."""
    reads: SAEPlace = SAEPlace()
    writes: SAEPlace = SAEPlace()
    """Where it writes; equal to `reads` except for transcoders."""
    model: str = ""
    """The model that the file names; empty if it names none."""

    def __post_init__(self) -> None:
        d_in, d_sae = _matrix(self, "w_enc")
        rows, d_out = _matrix(self, "w_dec")
        expected: dict[str, tuple[int, ...]] = {"b_enc": (d_sae,), "b_dec": (d_out,)}
        if self.threshold is not None:
            expected["threshold"] = (d_sae,)
        if self.w_skip is not None:
            expected["w_skip"] = (d_in, d_out)
        if rows != d_sae:
            raise _wrong(self, "W_dec", (rows, d_out), f"has {d_sae} rows as W_enc")
        for name, shape in expected.items():
            found = tuple(getattr(self, name).shape)
            if found != shape:
                raise _wrong(self, name, found, f"has the shape {list(shape)}")
        self._check_selection(d_sae)

    def _check_selection(self, d_sae: int) -> None:
        if self.selection == "threshold":
            if self.threshold is None:
                raise _wrong(self, "threshold", None, "is needed")
        elif self.k is None or not 1 <= self.k <= d_sae:
            raise _wrong(self, "k", self.k, f"is 1 to {d_sae}")
        elif self.selection == "groupmax" and d_sae % self.k:
            raise _wrong(self, "k", self.k, f"divides {d_sae} features")

    @property
    def d_in(self) -> int:
        """Width of the rows that are encoded."""
        return int(self.w_enc.shape[0])

    @property
    def d_sae(self) -> int:
        """Number of features."""
        return int(self.w_enc.shape[1])

    @property
    def d_out(self) -> int:
        """Width of the output: `d_in`, except for transcoders."""
        return int(self.w_dec.shape[1])

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors that are not None."""
        needed = (self.w_enc, self.b_enc, self.w_dec, self.b_dec)
        optional = (self.threshold, self.w_skip)
        return (*needed, *(one for one in optional if one is not None))

    def fingerprint(self) -> str:
        """SHA-256 of everything that determines the results."""
        said = (self.selection, self.k, self.input_norm, self.reads, self.writes)
        return fingerprint_of(said, self.tensors)

    @property
    def is_transcoder(self) -> bool:
        """Whether it writes to another place than it reads."""
        return self.reads != self.writes


def fingerprint_of(said: tuple[Any, ...], tensors: Iterable[torch.Tensor]) -> str:
    """SHA-256 of plain values and of tensors on the CPU."""
    found = hashlib.sha256(repr(said).encode())
    for tensor in tensors:
        found.update(repr((tensor.shape, tensor.dtype)).encode())
        found.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _matrix(sae: SparseAutoencoder, name: str) -> tuple[int, int]:
    tensor: torch.Tensor = getattr(sae, name)
    if tensor.ndim != 2 or not tensor.numel():
        raise _wrong(sae, name, tuple(tensor.shape), "is a matrix")
    return int(tensor.shape[0]), int(tensor.shape[1])


def _wrong(sae: SparseAutoencoder, part: str, found: object, rule: str) -> SAEFileError:
    return fail(
        f"path: {part} of the SAE {sae.name!r} is {found!r}, but it {rule}",
        "path",
        sae.name,
    )
