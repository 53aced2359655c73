# SPDX-License-Identifier: Apache-2.0
"""Rows that were dropped because a sink's queue had no room for them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vllm.v1.capture.types import CaptureChunk, CaptureFinalize, CaptureKey


class DroppedRows:
    """The dropped positions of each key, until its request ends.

    Used on the submitting thread only. The rows that a consumer gets are numbered
    without gaps: row offsets count delivered rows, and the sidecar lists their
    positions.
    """

    def __init__(self) -> None:
        self.positions: dict[CaptureKey, list[int]] = {}

    def note(self, chunks: Sequence[CaptureChunk]) -> None:
        """Record chunks that will not be delivered."""
        for chunk in chunks:
            dropped = self.positions.setdefault(chunk.key, [])
            dropped.extend(chunk.metadata["positions"])

    def renumber(self, chunks: Sequence[CaptureChunk]) -> None:
        """Change row offsets so that they count delivered rows only."""
        for chunk in chunks:
            chunk.row_offset -= len(self.positions.get(chunk.key, ()))

    def settle(self, finalizes: Sequence[CaptureFinalize]) -> Sequence[CaptureFinalize]:
        """The finalizes of a request, with its dropped rows noted in the sidecars.

        Dropped rows past the end of the request are ignored.
        """
        dropped = {
            final.key: set(self.positions.pop(final.key, ())) for final in finalizes
        }
        if not any(dropped.values()):
            return finalizes
        counted = [
            len(dropped[final.key].intersection(final.sidecar["positions"]))
            for final in finalizes
        ]
        if not any(counted):
            return finalizes
        rows = sum(len(final.sidecar["positions"]) for final in finalizes)
        note = (
            f"{sum(counted)} of {rows} rows were dropped because the consumer was too "
            "slow (--capture-overload-policy drop)"
        )
        return tuple(
            replace(final, sidecar=_without(final.sidecar, dropped[final.key], note))
            if number
            else final
            for final, number in zip(finalizes, counted)
        )


def _without(sidecar: dict[str, Any], dropped: set[int], note: str) -> dict[str, Any]:
    """`sidecar` without the dropped positions, and with `note`."""
    kept = [
        (position, token)
        for position, token in zip(sidecar["positions"], sidecar["token_ids"])
        if position not in dropped
    ]
    earlier = sidecar.get("capture_note")
    return sidecar | {
        "positions": [position for position, _ in kept],
        "token_ids": [token for _, token in kept],
        "num_rows": len(kept),
        "dropped_rows": len(sidecar["positions"]) - len(kept),
        "capture_note": note if earlier is None else f"{earlier}; {note}",
    }
