# SPDX-License-Identifier: Apache-2.0
"""A captured request in a worker: turns its rows into chunks and sidecars.

The key of a readout's results has the hook `HOOK.NAME.ARRAY`, such as
`post_block.lens.logprobs`. Its rows are the array's values at the key's layer and hook
point, one row per position.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from vllm.utils.math_utils import cdiv
from vllm.v1.capture.delivery.packet_queue import Ending
from vllm.v1.capture.dispatch.row_buffer import (
    GATHERED,
    Piece,
    RowBuffer,
    RowLedger,
    Rows,
)
from vllm.v1.capture.dispatch.row_store import RowStore, StoredBlock
from vllm.v1.capture.groups import GroupChunk, GroupEnd
from vllm.v1.capture.memory.buffer_pool import ROWS, RowCopy, copy_rows
from vllm.v1.capture.types import CaptureResult, VllmInternalRequestId
from vllm.v1.residual.capture_plan import CaptureEnd, CapturePlan, Reader
from vllm.v1.residual.capture_step import KeepRows, LoadRows
from vllm.v1.residual.heads import rows_of_heads
from vllm.v1.residual.readout_plan import Readout, ReadoutReader, ReadoutRows
from vllm.v1.residual.row_blocks import LocalGroup
from vllm.v1.residual.spans import (
    OPEN_END,
    Spans,
    contains,
    only_last,
    overlap,
    selected_below,
)
from vllm.v1.residual.tap import AFTER, Tap

LAYER_CONVENTION = "0-based block index"

Answer: TypeAlias = Callable[[str, CaptureResult], None]
"""`answer(instance, result)`: sends a result of a request to its front end."""


def chunks_of(
    req_id: VllmInternalRequestId, rows: ReadoutRows, positions: list[int]
) -> list[GroupChunk]:
    """A chunk with all values `[1, rows, values]`; none if there are no rows."""
    if not positions:
        return []
    dtype = getattr(torch, rows.dtype)
    values = torch.frombuffer(bytearray(rows.data), dtype=dtype)
    tensor = values.view(1, len(positions), -1)
    return [GroupChunk(req_id, (tap_of(rows),), tensor, 0, -1, positions)]


def end_of(
    req_id: VllmInternalRequestId, rows: ReadoutRows, facts: dict[str, Any]
) -> GroupEnd:
    """The end of a key; `facts` are those about the request and the positions."""
    readout: dict[str, Any] = {"name": rows.name, "kind": rows.kind}
    readout |= {"array": rows.array, "hook": rows.tap[1], "shape": list(rows.shape)}
    if rows.reduced:
        readout["reduced_positions"] = rows.positions
    width = torch.Size(rows.shape).numel()
    own = {"dtype": rows.dtype, "hidden_size": width, "readout": readout}
    return GroupEnd(req_id, (tap_of(rows),), facts | own)


def tap_of(rows: ReadoutRows) -> Tap:
    """Where a key's results are: its layer, and its hook point with the array."""
    return rows.tap[0], rows.hook


def nothing_of(readout: Readout) -> ReadoutRows:
    """What a consumer takes of a readout without results: a key without rows."""
    return ReadoutRows(
        name=readout.name,
        kind=readout.kind,
        array="none",
        tap=readout.taps[-1],
        positions=[],
        dtype="float32",
        shape=(0,),
        data=b"",
    )


def never_started(end: CaptureEnd, answer: Answer) -> None:
    """Send errors for a request of which this worker has computed no row."""
    key = VllmInternalRequestId(end.request_id), -1, "*"
    before = f"the request ended ({end.finish_reason}) before any of its rows was"
    for instance in end.instances:
        error = end.error or f"{before} computed"
        answer(instance, CaptureResult(key, "error", error))


class CapturedRequest:
    """Splits the rows of a request's groups into chunks for each reader.

    Used on the dispatch thread only.
    """

    def __init__(
        self,
        req_id: str,
        plan: CapturePlan,
        groups: Sequence[LocalGroup],
        prompt_token_ids: Sequence[int] | None,
        common: Mapping[str, Any],
        client_specs: Mapping[str, Any],
        early: frozenset[str],
        max_tokens: int | None = None,
        dtype: torch.dtype = torch.float32,
        takes_readouts: bool = True,
        may_skip: frozenset[str] = frozenset(),
    ) -> None:
        """Start without rows.

        Args:
            req_id: the request's internal id.
            plan: the request's plan.
            groups: its groups, reduced to the taps of this process.
            prompt_token_ids: None if the prompt was given as embeddings.
            common: sidecar entries that all requests share.
            client_specs: `SamplingParams.capture` as plain data, by instance.
            early: the instances that accept rows that may later be discarded
                (`truncates`).
            max_tokens: how many tokens the request may generate, if known.
            dtype: of the rows.
            takes_readouts: whether consumers here take the results of readouts.
            may_skip: the instances that need not be told of requests without rows.

        """
        self.req_id = VllmInternalRequestId(req_id)
        self._plan = plan
        self._groups = groups
        self._prompt_token_ids = prompt_token_ids
        self._common = common
        self._client_specs = client_specs
        self._keeping = plan.keeping
        self._skipped = may_skip & self._keeping
        early = early - self._keeping
        self._early = early
        self._most = (
            plan.num_prompt_tokens + max_tokens if max_tokens is not None else OPEN_END
        )
        self._dtype = dtype
        self._stored: dict[tuple[int, int], StoredBlock] = {}
        """By group and block: what is stored of the rows that will arrive."""
        self._block_size = 1
        self._ledgers = [RowLedger() for _ in groups]
        self._gathered = [
            RowBuffer(
                len(group.taps),
                dtype,
                early.isdisjoint(reader.instance for reader in group.readers),
            )
            for group in groups
        ]
        self._held: dict[tuple[int, str], list[Rows]] = {}
        """Rows held back, by group and instance; see `_waits`."""
        self._counts: dict[tuple[int, str], int] = {}
        self._handed_on: dict[tuple[int, str], list[tuple[int, int]]] = {}
        plan_of_readouts = plan.readouts if takes_readouts else None
        self._readout_readers = plan_of_readouts.readers if plan_of_readouts else ()

    def gather(
        self, pieces: Mapping[int, Sequence[Piece]], copies: list[RowCopy]
    ) -> list[tuple[int, Rows]]:
        """Allocate memory for the pieces of each group.

        Args:
            pieces: by group.
            copies: extended by the copies to do before the rows are read; after them
                the memory of the pieces is not needed any more.

        Returns:
            Groups and rows, to pass to `add`.

        """
        return [
            (group, rows)
            for group, found in pieces.items()
            for rows in self._gathered[group].gather(found, self._most, copies)
        ]

    def keep(self, asked: KeepRows, store: RowStore, width: int) -> None:
        """Have rows of the prompt stored as they arrive.

        Args:
            asked: says which; of the taps of other stages nothing is stored.
            store: gets the blocks.
            width: numbers per row of the stream.

        """
        size = self._block_size = asked.size
        self._stored.clear()  # What it began before a preemption was dropped.
        for index, group, number in asked.places:
            local = self._local(group)
            if local is not None:
                own = self._groups[local]
                shape = len(own.taps), size, own.width or width
                block = store.add(number, own.taps, shape, self._dtype)
                self._stored[local, index] = block

    def store(self, group: int, rows: Rows, copies: list[RowCopy]) -> None:
        """Add rows of a group to the blocks that are stored.

        Only rows of the prompt are, which the request's end does not make invalid.
        """
        size = self._block_size
        if not self._stored:
            return
        for index in range(rows.start // size, cdiv(rows.stop, size)):
            block = self._stored.get((group, index))
            part = rows.between(index * size, (index + 1) * size)
            if block is not None and part is not None:
                block.put(part.start - index * size, part.tensor, copies)
                if block.is_whole:
                    del self._stored[group, index]

    def _local(self, group: int) -> int | None:
        """The index here of a group of the plan; None if other stages have its taps."""
        taps = set(self._plan.groups[group].taps)
        found = (n for n, own in enumerate(self._groups) if own.taps[0] in taps)
        return next(found, None)

    def load(
        self, asked: LoadRows, found: Mapping[int, StoredBlock], width: int
    ) -> list[tuple[int, Rows]]:
        """Read stored rows.

        Args:
            asked: says which.
            found: the blocks, by number.
            width: numbers per row of the stream.

        Returns:
            Groups and rows without step, to pass to `add`. Those of a group of which a
            block is missing are left out, which the result says.

        Raises:
            OSError: rows on disk cannot be read.

        """
        size = asked.size
        blocks: dict[tuple[int, int], StoredBlock] = {}
        for index, group, number in asked.places:
            local = self._local(group)
            if local is not None and number in found:
                blocks[local, index] = found[number]
        loaded: list[tuple[int, Rows]] = []
        copies: list[RowCopy] = []
        for number, own in enumerate(self._groups):
            for start, stop in overlap(own.ranges, asked.start, asked.stop):
                indices = range(start // size, cdiv(stop, size))
                if not own.readers or any((number, i) not in blocks for i in indices):
                    continue
                memory, place = self._gathered[number].room_for(
                    stop - start,
                    max(stop - start, self._expected(own.ranges, start)),
                    own.width or width,
                )
                for index in indices:
                    first, last = index * size, (index + 1) * size
                    part = range(max(start, first), min(stop, last))
                    at = place + part.start - start
                    blocks[number, index].copy_to(memory, at, own.taps, part, copies)
                loaded.append((number, Rows(start, stop - start, memory, place, -1)))
        copy_rows(copies)
        return loaded

    def _expected(self, ranges: Spans, start: int) -> int:
        """How many rows are expected from `start` on that share memory."""
        end = min(self._plan.num_prompt_tokens + GATHERED, self._most)
        return sum([last - first for first, last in overlap(ranges, start, end)])

    def add(self, group: int, rows: Rows) -> dict[str, list[GroupChunk]]:
        """Add rows of a group; returns the rows to submit now, by instance."""
        return self._chunks(group, self._ledgers[group].add(rows))

    def keeps_rows(self, end: CaptureEnd) -> bool:
        """Whether any reader gets rows; `keep_when` may have decided that none does."""
        if end.error is not None or not end.kept:
            return True
        stop = self._plan.num_prompt_tokens + max(len(end.token_ids) - 1, 0)
        return any(
            name not in end.kept or overlap(self._spans_kept(name, end), 0, stop)
            for name in self._plan.row_lanes
        )

    def finish(
        self, end: CaptureEnd, answer: Answer
    ) -> tuple[dict[str, list[GroupChunk]], dict[str, Ending]]:
        """The remaining rows and, to be sent after them, the ends; by instance."""
        stop = self._plan.num_prompt_tokens + max(len(end.token_ids) - 1, 0)
        chunks: dict[str, list[GroupChunk]] = {}
        for number, ledger in enumerate(self._ledgers):
            settled = self._chunks(number, ledger.finish(stop))
            for instance, batch in settled.items():
                chunks.setdefault(instance, []).extend(batch)
        for (number, instance), held in sorted(self._held.items()):
            readers = self._groups[number].readers
            (own,) = (one for one in readers if one.instance == instance)
            first = stop - 1 if only_last(own.ranges) else 0
            spans = overlap(self._spans_kept(instance, end), first, stop)
            kept = [
                part
                for rows in held
                for span in spans
                if (part := rows.between(*span)) is not None
            ]
            if kept:
                chunk = self._make_chunk(number, own, kept)
                chunks.setdefault(instance, []).append(chunk)
        self._held.clear()
        skipped = self._skip(end, answer, stop)
        ends = {
            name: self._ends(name, end, stop)
            for name in self._plan.lanes
            if name not in skipped
        }
        for reader in self._readout_readers:
            if reader.instance in skipped:
                continue
            for made, own_end in self._readout_keys(reader, end, stop):
                chunks.setdefault(reader.instance, []).extend(made)
                ends[reader.instance].append(own_end)
        endings = {
            instance: Ending(self.req_id, tuple(own), partial(answer, instance))
            for instance, own in ends.items()
        }
        return chunks, endings

    def _spans_kept(self, instance: str, end: CaptureEnd) -> Spans:
        if instance not in self._keeping:
            return ((0, OPEN_END),)
        return tuple(end.kept.get(instance, ()))

    def _skip(self, end: CaptureEnd, answer: Answer, stop: int) -> set[str]:
        """Answer for the instances that keep no row and need not be told; their names.

        They write nothing.
        """
        if end.error is not None:
            return set()
        key = self.req_id, -1, "*"
        skipped = {
            name
            for name in self._skipped & end.kept.keys()
            if not overlap(self._spans_kept(name, end), 0, stop)
        }
        for name in skipped:
            answer(name, CaptureResult(key, "ok"))
        return skipped

    def _chunks(
        self, number: int, settled: Sequence[Rows]
    ) -> dict[str, list[GroupChunk]]:
        ready: dict[str, list[GroupChunk]] = {}
        for rows in settled:
            for reader in self._groups[number].readers:
                for start, stop in overlap(reader.ranges, rows.start, rows.stop):
                    part = rows.between(start, stop)
                    assert part is not None
                    early = reader.instance in self._early
                    early = early and not only_last(reader.ranges)
                    held = self._held.setdefault((number, reader.instance), [])
                    held.append(part)
                    if early or not self._waits(part, reader):
                        chunk = self._make_chunk(number, reader, held)
                        ready.setdefault(reader.instance, []).append(chunk)
                        held.clear()
        return ready

    def _waits(self, rows: Rows, reader: Reader) -> bool:
        """Whether rows are held back: until the end, or for the next ones of a prompt.

        These follow in the same memory. A consumer in another process that got them
        apart would have to copy all of them to join them.
        """
        # The front end detects stop strings and aborts after rows were computed: the
        # request may still end before those of generated tokens.
        may_void = rows.stop > self._plan.num_prompt_tokens
        if may_void or reader.instance in self._keeping:
            return True
        has_room = rows.first + rows.num_rows < rows.memory.shape[1]
        follows = rows.stop < self._plan.num_prompt_tokens
        return has_room and follows and contains(reader.ranges, rows.stop)

    def _make_chunk(self, number: int, reader: Reader, parts: list[Rows]) -> GroupChunk:
        """All rows of `parts`, which are of one group."""
        place = number, reader.instance
        offset = self._counts.get(place, 0)
        spans = self._handed_on.setdefault(place, [])
        positions: list[int] = []
        for part in parts:
            positions.extend(range(part.start, part.stop))
            spans.append((part.start, part.stop))
        self._counts[place] = offset + len(positions)
        group, step = self._groups[number], parts[-1].step
        taps = reader.named(group.taps)
        rows = ROWS.cat([part.tensor for part in parts])
        if reader.heads:
            rows = rows_of_heads(rows, reader.heads, reader.head_size)
        return GroupChunk(self.req_id, taps, rows, offset, step, positions)

    def _ends(self, instance: str, end: CaptureEnd, stop: int) -> list[GroupEnd]:
        return [
            GroupEnd(
                self.req_id,
                reader.named(group.taps),
                self._facts(number, reader, end, stop),
            )
            for number, group in enumerate(self._groups)
            for reader in group.readers
            if reader.instance == instance
        ]

    def _facts(
        self, number: int, reader: Reader, end: CaptureEnd, stop: int
    ) -> dict[str, Any]:
        positions, remarks = self._positions(number, reader, end, stop)
        facts = self._sidecar_of(reader.instance, positions, remarks, end)
        if width := self._groups[number].width:
            facts["hidden_size"] = width
        if reader.instance in self._keeping and end.error is None:
            kept = self._spans_kept(reader.instance, end)
            facts["fired"] = bool(overlap(kept, 0, stop))
        if reader.after:
            facts[AFTER] = True
        if reader.heads:
            facts["heads"] = list(reader.heads)
            facts["hidden_size"] = len(reader.heads) * reader.head_size
        return facts

    def _sidecar_of(
        self,
        instance: str,
        positions: list[int],
        remarks: dict[str, str],
        end: CaptureEnd,
    ) -> dict[str, Any]:
        """The sidecar of rows at `positions`, without what identifies the key."""
        if end.error is not None:
            remarks = remarks | {"capture_error": end.error}
        return {
            **self._common,
            **remarks,
            "vllm_internal_request_id": self.req_id,
            "client_request_id": self._plan.client_request_id,
            "client_spec": self._client_specs.get(instance),
            "sample_index": end.sample_index,
            "num_samples": self._plan.num_samples,
            "num_prompt_tokens": self._plan.num_prompt_tokens,
            "num_generated_tokens": len(end.token_ids),
            "finish_reason": end.finish_reason,
            "num_rows": len(positions),
            "positions": positions,
            "token_ids": self._tokens_at(positions, end.token_ids),
        }

    def _positions(
        self, number: int, reader: Reader, end: CaptureEnd, stop: int
    ) -> tuple[list[int], dict[str, str]]:
        """The positions of the reader's rows, with an error or note for the sidecar."""
        kept = self._spans_kept(reader.instance, end)
        positions = [
            position
            for span in selected_below(reader.ranges, stop)
            for part in overlap(kept, *span)
            for position in range(*part)
        ]
        spans = self._handed_on.get((number, reader.instance), [])
        arrived = _positions_below(stop, tuple(spans))
        if self._groups[number].held and (0, OPEN_END) in kept and arrived != positions:
            share = f"{len(arrived)} of {len(positions)} rows"
            note = f"the readout failed; {share} were not dropped before"
            return arrived, {"capture_note": note}
        return arrived, remarks_on(positions, arrived, reader.ranges, end, stop)

    def _readout_keys(
        self, reader: ReadoutReader, end: CaptureEnd, stop: int
    ) -> Iterator[tuple[list[GroupChunk], GroupEnd]]:
        """The chunks and the end of each key with results that a consumer takes."""
        assert self._plan.readouts is not None
        for readout in self._plan.readouts.readouts:
            if readout.name not in reader.names:
                continue
            found = [one for one in end.readouts if one.name == readout.name]
            arrived = found[0].positions if found else []
            # The token at which a readout ended the request was read out as well.
            until = max(stop, arrived[-1] + 1) if arrived else stop
            wanted = _positions_below(until, readout.ranges)
            remarks = remarks_on(wanted, arrived, readout.ranges, end, until)
            for rows in found or [nothing_of(readout)]:
                if rows.error:
                    remarks = remarks | {"capture_error": rows.error}
                positions = arrived[-1:] if rows.reduced else arrived
                facts = self._sidecar_of(reader.instance, positions, remarks, end)
                own = chunks_of(self.req_id, rows, positions)
                yield own, end_of(self.req_id, rows, facts)

    def _tokens_at(
        self, positions: Sequence[int], generated: Sequence[int]
    ) -> list[int | None]:
        prompt = self._plan.num_prompt_tokens
        return [
            generated[position - prompt]
            if position >= prompt
            else (self._prompt_token_ids[position] if self._prompt_token_ids else None)
            for position in positions
        ]


def _positions_below(stop: int, ranges: Spans) -> list[int]:
    positions: list[int] = []
    for first, last in overlap(ranges, 0, stop):
        positions.extend(range(first, last))
    return positions


def remarks_on(
    wanted: list[int], arrived: list[int], ranges: Spans, end: CaptureEnd, stop: int
) -> dict[str, str]:
    """An error or a note for the sidecar, if rows are missing.

    Args:
        wanted: positions that the consumer reads, below `stop`.
        arrived: positions whose rows arrived.
        ranges: the positions that the request asked for.
        end: of the request.
        stop: the position after the last valid row.

    """
    if arrived != wanted:
        share = f"{len(arrived)} of {len(wanted)} rows"
        if end.finish_reason != "abort":
            return {"capture_error": f"only {share} arrived"}
        return {"capture_note": f"the request was aborted after {share}"}
    if missed := _unreached(ranges, stop):
        note = (
            f"the request ended at position {stop - 1} and did not reach the "
            f"positions {missed}"
        )
        return {"capture_note": note}
    return {}


def _unreached(ranges: Spans, stop: int) -> list[int]:
    """Positions in bounded ranges that the request did not reach."""
    return [
        position
        for first, last in ranges
        if last < OPEN_END and last > stop
        for position in range(max(first, stop), last)
    ]
