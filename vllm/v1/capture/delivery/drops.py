# SPDX-License-Identifier: Apache-2.0
"""Rows that were dropped because a consumer was behind: counted, and said."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vllm.v1.capture.types import CaptureChunk, CaptureFinalize, CaptureKey


class DroppedRows:
    """The positions that were dropped of each key, until its request ends.

    Belongs to the thread that submits. What a consumer gets stays gapless for it:
    row offsets count the rows it got, and a sidecar lists their positions.
    """

    def __init__(self) -> None:
        self._positions: dict[CaptureKey, list[int]] = {}

    def note(self, chunks: Sequence[CaptureChunk]) -> None:
        """These chunks will not be delivered."""
        for chunk in chunks:
            dropped = self._positions.setdefault(chunk.key, [])
            dropped.extend(chunk.metadata["positions"])

    def renumber(self, chunks: Sequence[CaptureChunk]) -> None:
        """Let row offsets count only rows that are delivered."""
        if not self._positions:
            return
        for chunk in chunks:
            chunk.row_offset -= len(self._positions.get(chunk.key, ()))

    def settle(self, finalizes: Sequence[CaptureFinalize]) -> Sequence[CaptureFinalize]:
        """The finalizes of a request, with sidecars that say what was dropped.

        Rows past the end of the request did not count, dropped or not.
        """
        if not self._positions:
            return finalizes
        dropped = {
            final.key: set(self._positions.pop(final.key, ())) for final in finalizes
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
            f"{sum(counted)} of {rows} rows were dropped, as the consumer was behind "
            "(--capture-overload-policy drop)"
        )
        return tuple(
            replace(final, sidecar=_without(final.sidecar, dropped[final.key], note))
            if number
            else final
            for final, number in zip(finalizes, counted)
        )


def _without(sidecar: dict[str, Any], dropped: set[int], note: str) -> dict[str, Any]:
    """`sidecar` for the rows at the positions that were not dropped."""
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
