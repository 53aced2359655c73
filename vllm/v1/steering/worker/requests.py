# SPDX-License-Identifier: Apache-2.0
"""The tokens of each request in a step, by phase."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vllm.v1.residual.step_view import StepView


class RequestTokens(NamedTuple):
    """A request's tokens in a step."""

    req_id: str
    length: int
    """Length of the prompt, in tokens."""
    start: int
    """Position of the first token."""
    middle: int
    """Position of the first token that is generated; `stop` if none is."""
    stop: int
    """The position after the last token."""
    offset: int
    """From a position to the index of its token in the step."""
    rows: tuple[int, int]
    """The table rows of prompt tokens and of generated ones."""

    @property
    def parts(self) -> Iterator[tuple[int, int, int]]:
        """Table row, first position and the one after the last, of each phase here."""
        spans = (self.start, self.middle), (self.middle, self.stop)
        for row, (first, stop) in zip(self.rows, spans, strict=True):
            if first < stop:
                yield row, first, stop


def tokens_of(
    view: StepView, pairs: Sequence[tuple[int, int]], lengths: Sequence[int]
) -> list[RequestTokens]:
    """The tokens of each request.

    Args:
        view: the step's requests and tokens.
        pairs: prefill and decode row of each request.
        lengths: prompt length of each request, in tokens.

    """
    found = []
    starts, counts = view.num_computed.tolist(), view.num_scheduled.tolist()
    places = zip(starts, counts, view.first_row.tolist(), strict=True)
    for number, (start, count, row) in enumerate(places):
        length, stop = lengths[number], start + count
        middle = min(max(length, start), stop)
        place = length, start, middle, stop, row - start
        found.append(RequestTokens(view.req_ids[number], *place, pairs[number]))
    return found
