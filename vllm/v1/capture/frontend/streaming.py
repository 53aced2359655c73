# SPDX-License-Identifier: Apache-2.0
"""Rows in the intermediate outputs of a streaming request.

The rows of a streaming request arrive twice: as steps compute them, through the reader
`LIVE` that admission adds to its plan; and complete, from the consumer, with the final
output. Rows lost on the first way are therefore in the final output.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import torch

from vllm.sampling_params import RequestOutputKind
from vllm.v1.capture.groups import GroupChunk
from vllm.v1.capture.results import RowsByTap, request_key
from vllm.v1.capture.types import CaptureResult
from vllm.v1.residual.capture_plan import CapturePlan, Reader
from vllm.v1.residual.heads import rows_of_heads
from vllm.v1.residual.spans import contains, only_last
from vllm.v1.residual.tap import Tap

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams

Taps: TypeAlias = tuple[Tap, ...]
"""Of a group; its rows are sent as one tensor."""


class _Shown:
    """The rows of one group of taps that outputs have carried, in a growing buffer."""

    def __init__(self) -> None:
        self.positions: list[int] = []
        self.token_ids: list[int | None] = []
        self._buffer = torch.empty(0, 0, 0)

    def extend(
        self, positions: list[int], token_ids: list[int | None], rows: torch.Tensor
    ) -> None:
        start, stop = len(self.positions), len(self.positions) + len(positions)
        if stop > self._buffer.shape[1]:
            # Doubling avoids a copy of all rows per token.
            taps, _, width = rows.shape
            grown = rows.new_empty(taps, max(2 * start, stop), width)
            if start:
                grown[:, :start] = self._buffer[:, :start]
            self._buffer = grown
        self._buffer[:, start:stop] = rows
        # New lists, as earlier outputs have the others.
        self.positions = self.positions + positions
        self.token_ids = self.token_ids + token_ids

    @property
    def rows(self) -> torch.Tensor:
        """`[taps, rows, hidden_size]`, a view; existing rows never change."""
        return self._buffer[:, : len(self.positions)]


@dataclass
class _Sample:
    """State of one sample: its tokens, and rows that no output has carried yet."""

    token_ids: list[int] = field(default_factory=list)
    waiting: dict[Taps, list[tuple[list[int], torch.Tensor]]] = field(
        default_factory=dict
    )
    """By group: positions, and rows `[taps, rows, hidden_size]`."""
    shown: dict[tuple[str, Taps], _Shown] = field(default_factory=dict)

    def take(self, last: int) -> Iterator[tuple[Taps, list[int], torch.Tensor]]:
        """Remove and return the waiting rows up to the position `last`."""
        for taps, parts in self.waiting.items():
            rest = []
            for positions, rows in parts:
                cut = bisect_right(positions, last)
                if cut:
                    yield taps, positions[:cut], rows[:, :cut]
                if cut < len(positions):
                    rest.append((positions[cut:], rows[:, cut:]))
            self.waiting[taps] = rest


class LiveRequest:
    """The rows of one request, until its final output.

    They arrive on the inbox thread, outputs are made on the event loop's: the tracker
    of requests, which has it, holds its lock meanwhile.
    """

    def __init__(
        self,
        plan: CapturePlan,
        prompt_token_ids: list[int] | None,
        output_kind: RequestOutputKind,
        streaming: Iterable[str],
    ) -> None:
        """Start without rows; `streaming` are the instances whose rows are shown."""
        self._num_prompt_tokens = plan.num_prompt_tokens
        self._prompt_token_ids = prompt_token_ids
        self._num_samples = plan.num_samples
        self._cumulative = output_kind == RequestOutputKind.CUMULATIVE
        self._samples: dict[int, _Sample] = {}
        self._wanted: dict[str, dict[Tap, Reader]] = {name: {} for name in streaming}
        for group in plan.groups:
            for reader in group.readers:
                # Which row is the last is known when there is no further output.
                if reader.instance in self._wanted and not only_last(reader.ranges):
                    taps = dict.fromkeys(reader.named(group.taps), reader)
                    self._wanted[reader.instance].update(taps)

    def put(self, sample: int, chunks: Iterable[GroupChunk]) -> None:
        """Add rows of a sample."""
        waiting = self._samples.setdefault(sample, _Sample()).waiting
        for chunk in chunks:
            part = chunk.positions, chunk.tensor
            waiting.setdefault(tuple(chunk.taps), []).append(part)

    def show(self, output: "RequestOutput") -> dict[str, CaptureResult]:
        """The rows for an intermediate output: a pending result by instance."""
        parts = {}
        for completion in output.outputs:
            sample = self._samples.setdefault(completion.index, _Sample())
            if self._cumulative:
                sample.token_ids = list(completion.token_ids)
            else:
                sample.token_ids += completion.token_ids
            parts[completion.index] = self._payloads(sample)
        results, key = {}, request_key(output.request_id)
        for name in self._wanted:
            by_sample = {index: payloads[name] for index, payloads in parts.items()}
            payload = by_sample if self._num_samples > 1 else by_sample.get(0)
            results[name] = CaptureResult(key, "pending", payload=payload)
        return results

    def _payloads(self, sample: _Sample) -> dict[str, RowsByTap]:
        # If the request ended with the N tokens that its client has, its last row would
        # be at P+N-2. Rows past that may still be discarded.
        last = self._num_prompt_tokens + len(sample.token_ids) - 2
        if not self._cumulative:
            sample.shown.clear()
        for taps, positions, rows in sample.take(last):
            for name, wanted in self._wanted.items():
                # The taps of a group have the same readers.
                reader = wanted.get(taps[0])
                if reader is None:
                    continue
                kept = [
                    i for i, p in enumerate(positions) if contains(reader.ranges, p)
                ]
                if not kept:
                    continue
                own, part = [positions[i] for i in kept], rows
                if len(kept) < len(positions):
                    part = rows[:, kept]
                if reader.heads:
                    part = rows_of_heads(part, reader.heads, reader.head_size)
                shown = sample.shown.setdefault((name, taps), _Shown())
                shown.extend(own, self._tokens_at(own, sample.token_ids), part)
        payloads = {name: RowsByTap() for name in self._wanted}
        for (name, taps), shown in sample.shown.items():
            facts = {
                "positions": shown.positions,
                "token_ids": shown.token_ids,
                "heads": list(self._wanted[name][taps[0]].heads),
            }
            payloads[name].put_all(taps, shown.rows, facts)
        return payloads

    def _tokens_at(
        self, positions: list[int], generated: list[int]
    ) -> list[int | None]:
        prompt, given = self._num_prompt_tokens, self._prompt_token_ids
        return [
            generated[p - prompt] if p >= prompt else (given[p] if given else None)
            for p in positions
        ]


def carries_rows(params: "SamplingParams") -> bool:
    """Whether the intermediate outputs of a request may carry rows."""
    final_only = params.output_kind == RequestOutputKind.FINAL_ONLY
    return not final_only and params.capture_stream is True
