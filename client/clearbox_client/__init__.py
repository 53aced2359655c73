# SPDX-License-Identifier: Apache-2.0
"""A client of Clearbox servers: rows, readouts and steering as numpy arrays."""

from clearbox_client.aio import AsyncClient
from clearbox_client.client import Client
from clearbox_client.errors import ClearboxError, InputError
from clearbox_client.pairs import paired
from clearbox_client.payloads import decode
from clearbox_client.readouts import Readout
from clearbox_client.replies import CaptureOutcome, Chunk, Reply
from clearbox_client.rows import Rows, RowSet
from clearbox_client.vectors import pack, unpack

__all__ = [
    "AsyncClient",
    "CaptureOutcome",
    "Chunk",
    "ClearboxError",
    "Client",
    "InputError",
    "Readout",
    "Reply",
    "RowSet",
    "Rows",
    "decode",
    "pack",
    "paired",
    "unpack",
]
