# SPDX-License-Identifier: Apache-2.0
"""What the engine core sends a front end with the tokens of a request."""

import msgspec

from vllm.v1.readouts.plan import ReadoutPart
from vllm.v1.steering.receipts import ReceiptPart


class RequestResults(
    msgspec.Struct,
    array_like=True,
    omit_defaults=True,
    gc=False,
):
    """The results of a request that no output has carried yet."""

    readouts: list[ReadoutPart] | None = None
    receipt: list[ReceiptPart] | None = None
    """What steering has done to the request's tokens."""
