# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.v1.capture.consumers.storage.codecs import (
    CODECS,
    KeyEncoder,
    codec_of,
    orthonormal_basis,
    parse_codec,
)
from vllm.v1.capture.errors import CaptureValidationError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 2**-22}

finite = st.floats(-1e4, 1e4, width=32)


def tensors(dtype: torch.dtype) -> st.SearchStrategy[torch.Tensor]:
    return st.integers(1, 24).flatmap(
        lambda width: st.lists(
            st.lists(finite, min_size=width, max_size=width), min_size=1, max_size=6
        ).map(lambda rows: torch.tensor(rows, dtype=torch.float32).to(dtype))
    )


some_rows = st.sampled_from(DTYPES).flatmap(tensors)


def there_and_back(text: str, rows: torch.Tensor) -> torch.Tensor:
    codec = codec_of(parse_codec(text, "codec").describe())
    data = bytes(codec.encode(rows))
    row_bytes = codec.row_bytes(rows.shape[1], rows.dtype)
    if row_bytes is not None:
        assert len(data) == row_bytes * len(rows)
    back = codec.reconstruct(data, *rows.shape, rows.dtype)
    assert (back.shape, back.dtype) == (rows.shape, rows.dtype)
    return back


@settings(deadline=None)
@given(some_rows, st.sampled_from(["raw", "zstd"]))
def test_lossless_codecs_keep_every_bit(rows: torch.Tensor, text: str) -> None:
    back = there_and_back(text, rows)
    assert torch.equal(back.view(torch.uint8), rows.view(torch.uint8))


@settings(deadline=None)
@given(some_rows)
def test_full8_stays_within_its_error(rows: torch.Tensor) -> None:
    back, want = there_and_back("full8", rows).double(), rows.double()
    largest = want.abs().amax(dim=1, keepdim=True)
    allowed = largest * (1 / 254 + ROUNDING[rows.dtype]) + 1e-6
    assert ((back - want).abs() <= allowed).all()


@settings(deadline=None)
@given(some_rows, st.integers(1, 30))
def test_topk8_keeps_the_largest_and_zeroes_no_larger_ones(
    rows: torch.Tensor, k: int
) -> None:
    back, want = there_and_back(f"topk8:{k}", rows).double(), rows.double()
    kept = min(k, rows.shape[1])
    smallest = want.abs().topk(kept, dim=1).values[:, -1:]
    largest = want.abs().amax(dim=1, keepdim=True)
    quantized = largest * (1 / 254 + ROUNDING[rows.dtype]) + 1e-6
    above = want.abs() > smallest
    assert ((back - want).abs()[above] <= quantized.expand_as(want)[above]).all()
    dropped = back == 0
    limit = torch.maximum(smallest, quantized).expand_as(want)
    assert (want.abs()[dropped] <= limit[dropped]).all()
    assert ((back != 0).sum(dim=1) <= kept).all()


@settings(deadline=None, max_examples=30)
@given(some_rows, st.integers(1, 24), st.integers(0, 5))
def test_rp8_is_the_projection_with_full8_error(
    rows: torch.Tensor, k: int, seed: int
) -> None:
    back = there_and_back(f"rp8:{k}:{seed}", rows.float()).double()
    width = rows.shape[1]
    basis = orthonormal_basis(width, min(k, width), seed)
    assert np.allclose(basis.T @ basis, np.eye(min(k, width)), atol=1e-5)
    exact = rows.double() @ torch.from_numpy(basis @ basis.T).double()
    length = rows.double().norm(dim=1)
    # Quantized inside the subspace: at most max/254 per coordinate.
    allowed = length * (min(k, width) ** 0.5 / 254 + 1e-5) + 1e-5
    assert ((back - exact).norm(dim=1) <= allowed).all()


def test_rp8_loses_the_share_it_states() -> None:
    rows = torch.randn(400, 128)
    back = there_and_back("rp8:32:7", rows)
    lost = ((back - rows).norm() / rows.norm()).item() ** 2
    assert lost == pytest.approx(1 - 32 / 128, abs=0.03)


def test_rp8_depends_on_nothing_but_its_seed() -> None:
    rows = torch.randn(3, 40)
    assert torch.equal(there_and_back("rp8:8:1", rows), there_and_back("rp8:8:1", rows))
    other = there_and_back("rp8:8:2", rows)
    assert not torch.allclose(there_and_back("rp8:8:1", rows), other)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_does_not_look_finite(bad: float) -> None:
    rows = torch.ones(2, 4)
    rows[0, 1] = bad
    for text in ("full8", "topk8:2"):
        back = there_and_back(text, rows)
        assert not back[0].isfinite().all()
        assert back[1].isfinite().all()


@settings(deadline=None)
@given(some_rows, st.sampled_from(CODECS), st.integers(1, 4))
def test_blocks_do_not_change_the_rows(
    rows: torch.Tensor, name: str, size: int
) -> None:
    codec = parse_codec(name, "codec")
    encoder = KeyEncoder(codec, rows.shape[1], rows.dtype)
    data = b"".join(bytes(part) for part in encoder.encode(rows.split(size)))
    assert encoder.num_bytes == len(data)
    from vllm.v1.capture.consumers.filesystem.reader import decode

    dtype = str(rows.dtype).removeprefix("torch.")
    entry = {"shape": list(rows.shape), "codec": encoder.describe()}
    got = decode(data, entry, dtype, "here")
    assert torch.equal(got, there_and_back(name, rows))


@pytest.mark.parametrize(
    "text", ["", "gzip", "raw:1", "rp8:", "rp8:-1", "topk8:1:2", "topk8:0", None, 3]
)
def test_what_is_no_codec_is_refused(text: object) -> None:
    with pytest.raises(CaptureValidationError, match="codec"):
        parse_codec(text, "codec")
