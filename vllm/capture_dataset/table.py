# SPDX-License-Identifier: Apache-2.0
"""The rows of a shard as columns.

A shard holds the rows of consecutive prompts. Its taps are stored one after the other,
each with the rows of all prompts by ascending sample and position, so that one layer of
a shard is contiguous in the file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from vllm.capture_dataset.prompts import Prompt, TokenText
from vllm.capture_dataset.readouts import ReadoutColumn
from vllm.v1.readouts.results import ReadoutResult
from vllm.v1.residual.tap import Tap

ARROW_VALUES = {"float16": pa.float16(), "float32": pa.float32()}


@dataclass(frozen=True, slots=True)
class Captured:
    """A prompt with its rows."""

    prompt: Prompt
    rows: dict[Tap, torch.Tensor]
    """Rows `[rows, hidden_size]` by tap."""
    positions: list[int]
    """Token position of each row, equal for all taps."""
    token_ids: list[int]
    """Token ids of prompt and answer."""
    text: TokenText
    """Text of the same tokens."""
    readouts: Mapping[str, ReadoutResult] = field(default_factory=dict)


@dataclass(frozen=True)
class Shard:
    """Consecutive prompts whose rows are stored in one file."""

    number: int
    items: Sequence[Captured]
    taps: Sequence[Tap]
    carried: dict[str, pa.DataType]
    stored_dtype: str
    readouts: Sequence[ReadoutColumn] = ()

    @cached_property
    def counts(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Number of rows of each prompt, `[prompts]`."""
        return np.array([len(item.positions) for item in self.items], np.int64)

    @property
    def num_rows(self) -> int:
        """Number of rows of one tap."""
        return int(self.counts.sum())

    @cached_property
    def columns(self) -> dict[str, pa.Array]:
        """All columns that are equal for every tap, `[num_rows]` each."""
        entries = [item.prompt.entry for item in self.items]
        owner = np.repeat(np.arange(len(entries)), self.counts)
        positions = np.concatenate(
            [np.array(item.positions, np.int32) for item in self.items]
        )
        lengths = np.array([len(item.prompt.token_ids) for item in self.items])
        samples = np.array([entry.sample for entry in entries], np.int64)

        def each(values: list[Any], kind: pa.DataType) -> pa.Array:
            return pa.array(values, kind).take(pa.array(owner))

        def of_rows(per_token: Sequence[Sequence[Any]], kind: pa.DataType) -> pa.Array:
            pairs = zip(self.items, per_token, strict=True)
            found = [values[at] for item, values in pairs for at in item.positions]
            return pa.array(found, kind)

        items, texts = self.items, [item.text for item in self.items]

        return {
            "sample": pa.array(samples[owner]),
            "prompt_id": each([entry.prompt_id for entry in entries], pa.string()),
            **{
                name: each([entry.carried[index] for entry in entries], kind)
                for index, (name, kind) in enumerate(self.carried.items())
            },
            "position": pa.array(positions),
            "is_prompt": pa.array(positions < lengths[owner]),
            "token_id": of_rows([item.token_ids for item in items], pa.int32()),
            "token": of_rows([text.tokens for text in texts], pa.string()),
            "text_offset": of_rows([text.offsets for text in texts], pa.int32()),
            **{
                one.name: one.of_tap(self.taps[0], self.items)
                for one in self.readouts
                if not one.taps
            },
        }

    @cached_property
    def readouts_by_tap(self) -> list[ReadoutColumn]:
        """The readout columns that differ between taps."""
        return [column for column in self.readouts if column.taps]

    def values(self, tap: Tap) -> torch.Tensor:
        """The values `[num_rows, hidden_size]` of a tap, in the stored dtype.

        Raises:
            ValueError: a value is out of the stored dtype's range.

        """
        rows = torch.cat([item.rows[tap] for item in self.items])
        stored = rows.to(getattr(torch, self.stored_dtype))
        if self.stored_dtype == "float16" and not bool(stored.isfinite().all()):
            raise ValueError(
                f"values up to {rows.float().abs().max():.4g} at {tap} are out of the "
                "range of float16; store them as float32 with --values-dtype float32"
            )
        return stored.contiguous()

    def schema(self, width: int, metadata: dict[str, str]) -> pa.Schema:
        """The table's schema."""
        columns = self.columns
        names = list(columns)
        at = names.index("position")
        fields = [pa.field(name, columns[name].type) for name in names]
        fields[at:at] = [pa.field("layer", pa.int32()), pa.field("hook", pa.string())]
        fields += [pa.field(one.name, one.type) for one in self.readouts_by_tap]
        values = pa.list_(ARROW_VALUES[self.stored_dtype], width)
        fields.append(pa.field("values", values))
        return pa.schema(fields, metadata=metadata)

    def batch(self, tap: Tap, schema: pa.Schema) -> pa.RecordBatch:
        """All rows of a tap."""
        layer, hook = tap
        count = self.num_rows
        values = self.values(tap)
        flat = pa.array(values.numpy().reshape(-1))
        made = self.columns | {
            "layer": pa.array(np.full(count, layer, np.int32)),
            "hook": pa.array([hook]).take(pa.array(np.zeros(count, np.int32))),
            "values": pa.FixedSizeListArray.from_arrays(flat, values.shape[1]),
            **{one.name: one.of_tap(tap, self.items) for one in self.readouts_by_tap},
        }
        return pa.RecordBatch.from_arrays(
            [made[n] for n in schema.names], schema=schema
        )
