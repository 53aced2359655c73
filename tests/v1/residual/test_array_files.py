# SPDX-License-Identifier: Apache-2.0
"""Files of arrays that somebody else wrote are read in bounded memory, or refused."""

import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vllm.v1.residual.array_files import SMALL, read_npy, read_npz, read_pickled


def header(text: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def test_an_archive_that_unpacks_to_far_more_than_its_size_is_not_read(
    tmp_path: Path,
) -> None:
    zeros, few = np.zeros(2 * SMALL, np.uint8), np.zeros(SMALL // 2, np.uint8)
    for name in ("bomb.npz", "bomb.pt"):
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("W_enc.npy", zeros.tobytes())
    assert (tmp_path / "bomb.npz").stat().st_size < SMALL / 100
    tracemalloc.start()
    for read, name in ((read_npz, "bomb.npz"), (read_pickled, "bomb.pt")):
        with pytest.raises(ValueError, match="without compression"):
            read(tmp_path / name)
    assert tracemalloc.get_traced_memory()[1] < SMALL / 16
    tracemalloc.stop()
    np.savez_compressed(tmp_path / "few.npz", few=few)
    assert read_npz(tmp_path / "few.npz")["few"].nbytes == len(few)


def test_a_view_that_is_larger_than_its_file_is_not_copied(tmp_path: Path) -> None:
    torch.save({"a": {"b": torch.ones(1).expand(1 << 40)}}, tmp_path / "view.pt")
    with pytest.raises(ValueError, match="it unpacks to"):
        read_pickled(tmp_path / "view.pt")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04",
        b"\x80\x02",
        header(
            b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }"
        ),
        header(b"(" * 3000),
        header(b"{" * 60),
        header(b"{'descr': 'zz', 'fortran_order': False, 'shape': (1,), }"),
    ],
    ids=range(7),
)
@pytest.mark.parametrize("read", [read_npz, read_npy, read_pickled])
def test_damaged_files_are_value_errors(
    read: Callable[[Path], Any], content: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    with pytest.raises(ValueError):
        read(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.npy", content)
    with pytest.raises(ValueError):
        read(file)
