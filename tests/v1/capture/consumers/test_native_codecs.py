# SPDX-License-Identifier: Apache-2.0
"""The compiled codecs produce the same bytes as the Python ones."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.v1.capture.consumers.storage import quantize
from vllm.v1.capture.delivery.row_bytes import raw_bytes
from vllm.v1.residual import native
from vllm.v1.residual.native import DTYPES, Library


def compiled() -> Library:
    library = native.library()
    assert library is not None, "fork build leaves the native library out here"
    return library


SETS = compiled().instruction_sets()

# Any bits: NaN of every kind, infinities, subnormals, zeros of both signs.
bits = st.one_of(
    st.integers(0, 0xFFFF),
    st.sampled_from([0x7F80, 0xFF80, 0x7FC0, 0x0001, 0x8000, 0x7C00, 0x7C01, 0x3F80]),
)


@st.composite
def any_rows(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(list(DTYPES)))
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 70))
    halves = shape[0] * shape[1] * dtype.itemsize // 2
    kind = draw(st.sampled_from(["bits", "normal", "few values"]))
    if kind == "bits":
        words = draw(st.lists(bits, min_size=halves, max_size=halves))
        return torch.tensor(words, dtype=torch.uint16).view(dtype).view(shape)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    rows = torch.randn(shape, generator=generator)
    if kind == "few values":  # equal magnitudes
        rows = (rows * 2).round()
    return (rows * 2.0 ** draw(st.integers(-140, 14))).to(dtype)


@pytest.mark.parametrize("instructions", SETS)
@settings(deadline=None, max_examples=150)
@given(rows=any_rows())
def test_full8_records_are_those_of_numpy(
    instructions: str, rows: torch.Tensor
) -> None:
    with np.errstate(invalid="ignore"):
        want = quantize.full8_reference(rows)
    data = raw_bytes(rows)
    got = compiled().encode_full8(data, DTYPES[rows.dtype], *rows.shape, instructions)
    assert got == want


@pytest.mark.parametrize("instructions", SETS)
@settings(deadline=None, max_examples=150)
@given(rows=any_rows(), share=st.floats(0, 1))
def test_topk8_records_are_those_of_numpy(
    instructions: str, rows: torch.Tensor, share: float
) -> None:
    k = 1 + int(share * (rows.shape[1] - 1))
    with np.errstate(invalid="ignore"):
        want = quantize.topk8_reference(rows, k)
    data, dtype = raw_bytes(rows), DTYPES[rows.dtype]
    assert compiled().encode_topk8(data, dtype, *rows.shape, k, instructions) == want


def test_what_does_not_fit_is_refused() -> None:
    library, rows = compiled(), bytes(16)
    with pytest.raises(ValueError, match="expected 2 rows of 10 bytes, got 16"):
        library.encode_full8(rows, "bfloat16", 2, 5)
    with pytest.raises(ValueError, match="float64"):
        library.encode_full8(rows, "float64", 1, 2)
    with pytest.raises(ValueError, match="k must be"):
        library.encode_topk8(rows, "float32", 1, 4, 5)
    with pytest.raises(ValueError, match="sse9"):
        library.encode_full8(rows, "float32", 1, 4, "sse9")
    with pytest.raises(ValueError, match="even address"):
        library.encode_full8(memoryview(bytes(17))[1:], "float16", 2, 4)


def test_without_the_library_python_gives_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = torch.randn(5, 33).bfloat16()
    with_it = quantize.encode_full8(rows), quantize.encode_topk8(rows, 7)
    monkeypatch.setattr(quantize, "library", lambda: None)
    assert (quantize.encode_full8(rows), quantize.encode_topk8(rows, 7)) == with_it


def test_a_missing_library_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(native, "MODULE", "vllm.v1.no_such_library")
    monkeypatch.setattr(native.logger, "warning", lambda text, *_: said.append(text))
    native.library.cache_clear()
    assert native.library() is native.library() is None
    native.library.cache_clear()
    assert len(said) == 1
