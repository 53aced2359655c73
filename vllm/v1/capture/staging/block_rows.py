# SPDX-License-Identifier: Apache-2.0
"""Which row of its block each request has while it decodes: the same one, step by step.

While requests come and go the others keep their seats, so that what is read behind
each step lies where it is expected; who comes takes the seat of one who has gone. A
seat that nobody has is a row of staging memory that nobody writes. A change costs what
the requests cost that have changed.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

from vllm.v1.capture.staging.blocks import Block, Pick, Seat, rows_of

Columns: TypeAlias = tuple[int, ...]

MOST_EMPTY = 8
"""Seats that may be empty, or a quarter of all of them, before all move together."""


class Seats:
    """Of one block."""

    __slots__ = ("_empty", "number", "of")

    def __init__(self) -> None:
        self.of: dict[str, Seat] = {}
        """By request."""
        self.number = 0
        """Some may be empty."""
        self._empty: list[int] = []

    def take(self, req_id: str, group: int, origin: int) -> None:
        """A request sits down, or keeps its place."""
        before = self.of.get(req_id)
        if before is not None:
            if before.origin == origin:
                return
            place = before.place
        elif self._empty:
            place = self._empty.pop()
        else:
            place = self.number
            self.number += 1
        self.of[req_id] = Seat(group, origin, place)

    def leave(self, req_id: str) -> None:
        """A request gets up, if it sits here."""
        seat = self.of.pop(req_id, None)
        if seat is not None:
            self._empty.append(seat.place)

    def move_together(self) -> None:
        """Leave no seat empty."""
        if self._empty:
            self.of = {
                req_id: Seat(seat.group, seat.origin, place)
                for place, (req_id, seat) in enumerate(self.of.items())
            }
            self.number, self._empty = len(self.of), []

    @property
    def too_many(self) -> bool:
        """Whether more are empty than may be."""
        return len(self._empty) > max(MOST_EMPTY, self.number // 4)


class Seating:
    """The seats of the requests that had one token in the last step, by block."""

    def __init__(self, most_rows: int) -> None:
        """`most_rows`: of a step; seats stay empty only where it has fewer."""
        self._most_rows = most_rows
        self._seats: dict[Columns, Seats] = {}

    def change(self) -> None:
        """Seats will be taken and left; blocks that were given out stay the same."""
        for seats in self._seats.values():
            seats.of = seats.of.copy()

    def take(self, columns: Columns, req_id: str, group: int, origin: int) -> None:
        """A request has a row of this block in this step."""
        seats = self._seats.get(columns)
        if seats is None:
            seats = self._seats[columns] = Seats()
        seats.take(req_id, group, origin)

    def leave(self, columns: Columns, req_id: str) -> None:
        """It has none."""
        if columns in self._seats:
            self._seats[columns].leave(req_id)

    def leave_all(self, req_id: str) -> None:
        """It has none of any block."""
        for seats in self._seats.values():
            seats.leave(req_id)

    def blocks(self, picked: Mapping[Columns, Sequence[Pick]]) -> tuple[Block, ...]:
        """The blocks of a step: who has a seat, and behind them these rows."""
        for seats in self._seats.values():
            if seats.too_many:
                seats.move_together()
        blocks = self._blocks(picked)
        if rows_of(blocks) > self._most_rows:
            for seats in self._seats.values():
                seats.move_together()
            blocks = self._blocks(picked)
        return blocks

    def _blocks(self, picked: Mapping[Columns, Sequence[Pick]]) -> tuple[Block, ...]:
        # A block in which nobody sits is forgotten.
        self._seats = {c: seats for c, seats in self._seats.items() if seats.of}
        blocks = [
            block(columns, seats, picked.get(columns, ()))
            for columns, seats in self._seats.items()
        ]
        for columns, picks in picked.items():
            if columns not in self._seats:
                blocks.append(block(columns, NOBODY, picks))
        return tuple(blocks)


NOBODY = Seats()


def block(columns: Columns, seats: Seats, picks: Sequence[Pick]) -> Block:
    """The seats, then the picks one behind the other."""
    if not picks:
        return Block(columns, seats.of, (), (), seats.number)
    *offsets, end = accumulate([pick[3] for pick in picks], initial=seats.number)
    return Block(columns, seats.of, picks, offsets, end)
