# SPDX-License-Identifier: Apache-2.0
"""Responses with rows as Arrow tables."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from clearbox_client.bulk import ARROW, Content
from clearbox_client.errors import ClearboxError, InputError

if TYPE_CHECKING:
    import pyarrow as pa

ARROW_ONLY = {"Accept": ARROW}


def check_captures(fields: Mapping[str, Any]) -> None:
    """Check that a response to a request with these fields can be a table.

    Raises:
        InputError: it cannot, or pyarrow is missing; names the field and the remedy.

    """
    if find_spec("pyarrow") is None:
        message = "a table needs pyarrow; pip install clearbox-client[arrow]"
        raise InputError(message, "table", "pyarrow")
    capture = fields.get("capture")
    if not isinstance(capture, Mapping) or not capture:
        message = "a table needs rows; pass capture={'inline': {'hooks': ...}}"
        raise InputError(message, "capture", capture)
    for name, spec in capture.items():
        if isinstance(spec, Mapping) and spec.get("transport", "http") != "http":
            message = "rows in shared memory make no table; omit it, or call complete"
            raise InputError(message, f"capture.{name}.transport", spec["transport"])
    if fields.get("stream"):
        message = "the rows of a stream make no table; omit it, or call stream"
        raise InputError(message, "stream", True)


def table_in(content: Content, kind: str) -> "pa.Table":
    """The table of a response's body of the media type `kind`, as a view of it.

    Raises:
        ClearboxError: the body is another form.

    """
    if kind != ARROW:
        raise ClearboxError(
            f"the server has answered in {kind}: the captured rows differ in dtype or "
            "width; call complete, or capture hook points of one width",
            0,
            "capture",
            None,
        )
    import pyarrow as pa

    with pa.ipc.open_stream(pa.py_buffer(content)) as stream:
        return stream.read_all()
