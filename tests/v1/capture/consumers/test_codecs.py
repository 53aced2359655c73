# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.v1.capture.consumers.storage.codecs import (
    CODECS,
    KeyEncoder,
    codec_of,
    parse_codec,
)
from vllm.v1.capture.errors import CaptureValidationError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

finite = st.floats(-1e4, 1e4, width=32)


def tensors(dtype: torch.dtype) -> st.SearchStrategy[torch.Tensor]:
    return st.integers(1, 24).flatmap(
        lambda width: st.lists(
            st.lists(finite, min_size=width, max_size=width), min_size=1, max_size=6
        ).map(lambda rows: torch.tensor(rows, dtype=torch.float32).to(dtype))
    )


some_rows = st.sampled_from(DTYPES).flatmap(tensors)


@settings(deadline=None)
@given(some_rows, st.sampled_from(list(CODECS)), st.integers(1, 4))
def test_codecs_keep_every_bit_of_rows_in_blocks(
    rows: torch.Tensor, name: str, size: int
) -> None:
    codec = parse_codec(name, "codec")
    encoder = KeyEncoder(codec, rows.shape[1], rows.dtype)
    data = b"".join(bytes(part) for part in encoder.encode(rows.split(size)))
    assert encoder.num_bytes == len(data)
    row_bytes = codec.row_bytes(rows.shape[1], rows.dtype)
    assert row_bytes is None or len(data) == row_bytes * len(rows)
    from vllm.v1.capture.consumers.filesystem.reader import decode

    dtype = str(rows.dtype).removeprefix("torch.")
    entry = {"shape": list(rows.shape), "codec": encoder.describe()}
    got = decode(data, entry, dtype, "here")
    assert torch.equal(got.view(torch.uint8), rows.view(torch.uint8))


@pytest.mark.parametrize("text", ["", "gzip", "raw:1", "rp8:256", None, 3])
def test_what_is_no_codec_is_refused(text: object) -> None:
    with pytest.raises(CaptureValidationError, match="codec must be raw or zstd"):
        parse_codec(text, "codec")


def test_a_file_of_an_unknown_codec_needs_another_version() -> None:
    with pytest.raises(ValueError, match="the version that wrote it"):
        codec_of({"name": "rp8"})
