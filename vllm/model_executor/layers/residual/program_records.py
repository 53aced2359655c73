# SPDX-License-Identifier: Apache-2.0
"""Records: what a kernel needs first of each token's program, at one place per token.

To begin with a token's program, a kernel loads the token's row, then the address of
the row's program, then the program's fields, then a vector. Each load waits for the one
before, about 0.4 µs, which in a decode step is a large part of what a hook point takes.
Therefore one kernel looks the programs of a step's tokens up at all hook points before
a recorded graph is replayed, if they have changed, and writes the fields to records,
whose place is known from the token's index.

Legend: R tokens that have a record, I rows of the index.
"""

import torch

from vllm.model_executor.layers.residual.program import WORDS
from vllm.triton_utils import HAS_TRITON, tl, triton

RECORD_WORDS = 16
"""Size of a record in words of 4 bytes: the program's address (0: the token has none),
whether it is simple, flags and gate of its first instruction, an unused word, the
addresses that this reads and writes for this token, its c0 to c3, low and high."""


if HAS_TRITON:
    _WORDS = tl.constexpr(WORDS)
    _RECORD_WORDS = tl.constexpr(RECORD_WORDS)

    @triton.jit
    def instruction(words, number, token, live):  # type: ignore[no-untyped-def]
        """The fields of an instruction that do not depend on the stream.

        Args:
            words: address of the program.
            number: of the instruction, from 0.
            token: index in the step.
            live: whether the instruction exists; otherwise all fields are 0.

        """
        at = words + (number + 1) * _WORDS
        longs = tl.cast(at, tl.pointer_type(tl.int64))
        floats = tl.cast(at, tl.pointer_type(tl.float32))
        kind = tl.load(at, mask=live, other=0)
        flags = tl.load(at + 1, mask=live, other=0)
        shift = token * tl.load(longs + 3, mask=live, other=0)
        read_at = tl.load(longs + 4, mask=live, other=0) + shift
        write_at = tl.load(longs + 5, mask=live, other=0) + shift
        c0 = tl.load(floats + 18, mask=live, other=0.0)
        c1 = tl.load(floats + 19, mask=live, other=0.0)
        c2 = tl.load(floats + 20, mask=live, other=0.0)
        c3 = tl.load(floats + 21, mask=live, other=0.0)
        return kind, flags, read_at, write_at, c0, c1, c2, c3

    @triton.jit
    def look_up(index_ptr, row, token):  # type: ignore[no-untyped-def]
        """The fields of a record, from the index and a token's row of it."""
        program = tl.load(index_ptr + row)
        exists = program != 0
        words = tl.cast(program, tl.pointer_type(tl.int32))
        is_simple = tl.load(words + 1, mask=exists, other=0)
        _, flags, read_at, write_at, c0, c1, c2, c3 = instruction(
            words, 0, token, exists
        )
        gate = tl.load(words + _WORDS + 4, mask=exists, other=-1)
        floats = tl.cast(words + _WORDS, tl.pointer_type(tl.float32))
        low = tl.load(floats + 22, mask=exists, other=0.0)
        high = tl.load(floats + 23, mask=exists, other=0.0)
        return (
            program,
            is_simple,
            flags,
            gate,
            read_at,
            write_at,
            c0,
            c1,
            c2,
            c3,
            low,
            high,
        )

    @triton.jit
    def load_record(records_ptr, token):  # type: ignore[no-untyped-def]
        """The fields of a token's record, as `look_up` returns them."""
        at = records_ptr + token * _RECORD_WORDS
        longs = tl.cast(at, tl.pointer_type(tl.int64))
        floats = tl.cast(at, tl.pointer_type(tl.float32))
        # Other data of the step must not displace what every step reads.
        program = tl.load(longs, eviction_policy="evict_last")
        is_simple = tl.load(at + 2, eviction_policy="evict_last")
        flags = tl.load(at + 3, eviction_policy="evict_last")
        gate = tl.load(at + 4, eviction_policy="evict_last")
        read_at = tl.load(longs + 3, eviction_policy="evict_last")
        write_at = tl.load(longs + 4, eviction_policy="evict_last")
        c0 = tl.load(floats + 10, eviction_policy="evict_last")
        c1 = tl.load(floats + 11, eviction_policy="evict_last")
        c2 = tl.load(floats + 12, eviction_policy="evict_last")
        c3 = tl.load(floats + 13, eviction_policy="evict_last")
        low = tl.load(floats + 14, eviction_policy="evict_last")
        high = tl.load(floats + 15, eviction_policy="evict_last")
        return (
            program,
            is_simple,
            flags,
            gate,
            read_at,
            write_at,
            c0,
            c1,
            c2,
            c3,
            low,
            high,
        )

    @triton.jit
    def _write_records_kernel(  # type: ignore[no-untyped-def]
        records_ptr,  # [taps, R, RECORD_WORDS], int32
        index_ptr,  # [taps, I], int64: the address of a program, or 0
        rows_ptr,  # [>= tokens], int32
        records_stride,
        index_stride,
    ):
        token = tl.program_id(0).to(tl.int64)
        tap = tl.program_id(1).to(tl.int64)
        row = tl.load(rows_ptr + token).to(tl.int64)
        found = look_up(index_ptr + tap * index_stride, row, token)
        at = records_ptr + tap * records_stride + token * _RECORD_WORDS
        longs = tl.cast(at, tl.pointer_type(tl.int64))
        floats = tl.cast(at, tl.pointer_type(tl.float32))
        tl.store(longs, found[0])
        tl.store(at + 2, found[1])
        tl.store(at + 3, found[2])
        tl.store(at + 4, found[3])
        tl.store(longs + 3, found[4])
        tl.store(longs + 4, found[5])
        tl.store(floats + 10, found[6])
        tl.store(floats + 11, found[7])
        tl.store(floats + 12, found[8])
        tl.store(floats + 13, found[9])
        tl.store(floats + 14, found[10])
        tl.store(floats + 15, found[11])


def write_records(
    records: torch.Tensor, index: torch.Tensor, rows: torch.Tensor, num_tokens: int
) -> None:
    """Write the records of the first tokens of a step at all hook points.

    Args:
        records: `[taps, R, RECORD_WORDS]` int32, contiguous.
        index: `[taps, I]` int64, the address of the program of each row, or 0.
        rows: `[>= num_tokens]` int32, a row of the index for each token.
        num_tokens: at most R.

    """
    assert num_tokens <= records.shape[1], "tokens without records"
    _write_records_kernel[(num_tokens, len(records))](
        records, index, rows, records.stride(0), index.stride(0), num_warps=1
    )
