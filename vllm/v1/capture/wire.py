# SPDX-License-Identifier: Apache-2.0
"""What the front end tells the workers when a captured request has ended."""

import msgspec


class CaptureEnd(msgspec.Struct, frozen=True, array_like=True):
    """The end of one request, as the client has seen it.

    Travels to the workers with the scheduler's output, after every step that
    computed rows of the request. Only the front end knows which generated tokens
    count: it finds stop strings, and aborts come from there.
    """

    request_id: str
    reply_to: str
    token_ids: list[int]
    sample_index: int
    finish_reason: str
    instances: list[str]
