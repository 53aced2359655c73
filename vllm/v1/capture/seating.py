# SPDX-License-Identifier: Apache-2.0
"""Which row of its block each request has while it decodes: the same one, step by step.

While requests come and go the others keep their seats, so that what is read behind
each step lies where it is expected; who comes takes the seat of one who has gone. A
seat that nobody has is a row of staging memory that nobody writes.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from vllm.v1.capture.rows import Block, Pick, rows_of

Columns: TypeAlias = tuple[int, ...]

MOST_EMPTY = 8
"""Seats that may be empty, or a quarter of all of them, before all move together."""


NOBODY: Mapping[tuple[str, int], int] = {}


class Seats(NamedTuple):
    """Of one block."""

    of: Mapping[tuple[str, int], int]
    """By request and group."""
    number: int
    """Some may be empty."""


class Seating:
    """The seats of the requests that had one row in the last steps, by block."""

    def __init__(self, most_rows: int) -> None:
        """`most_rows`: of a step; seats stay empty only where it has fewer."""
        self._most_rows = most_rows
        self._seats: dict[Columns, Seats] = {}

    def blocks(self, picked: Mapping[Columns, Sequence[Pick]]) -> tuple[Block, ...]:
        """The blocks of a step, each pick at its seat."""
        # Of other blocks nobody goes on.
        self._seats = {
            columns: seats
            for columns, seats in self._seats.items()
            if columns in picked
        }
        blocks = tuple([self._seated(*found) for found in picked.items()])
        if rows_of(blocks) <= self._most_rows:
            return blocks
        self._seats = {}
        return tuple([in_order(*found) for found in picked.items()])

    def _seated(self, columns: Columns, picks: Sequence[Pick]) -> Block:
        who = [pick[:2] for pick in picks]
        distinct = set(who)
        if len(distinct) < len(who) or max([pick[3] for pick in picks]) > 1:
            return in_order(columns, picks)
        seats, number = self._seats.get(columns, (NOBODY, 0))
        number = max(number, len(who))
        if number - len(who) > max(MOST_EMPTY, number // 4):
            seats, number = NOBODY, len(who)
        if seats.keys() != distinct:
            kept = {one: seats[one] for one in who if one in seats}
            empty = iter(sorted(set(range(number)).difference(kept.values())))
            seats = kept | {one: next(empty) for one in who if one not in kept}
        self._seats[columns] = Seats(seats, number)
        return Block(columns, picks, [seats[one] for one in who], number)


def in_order(columns: Columns, picks: Sequence[Pick]) -> Block:
    """A block of picks one behind the other."""
    *offsets, end = accumulate([pick[3] for pick in picks], initial=0)
    return Block(columns, picks, offsets, end)
