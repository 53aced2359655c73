# SPDX-License-Identifier: Apache-2.0
"""The likeliest tokens of rows of logits and their log-probabilities.

One launch of a kernel finds them. Operations of PyTorch need some 30 launches for it,
and a float32 copy of the logits. On two H100s a lens for eight of 32 requests had 0.877
of upstream's throughput with these and has 0.896, with all that changed beside it; the
kernel alone was not measured.

Each tensor-parallel rank finds the likeliest of the tokens whose logits it computes.
"""

from functools import lru_cache
from typing import NamedTuple

import torch

from vllm.triton_utils import HAS_TRITON, tl, triton
from vllm.v1.readouts.worker.jobs import Arrays

GROUP = 128
"""Logits of which the largest is found first, on a CPU; see `largest`."""
MOST = 32
"""Largest number of tokens for the kernel, which reads the logits once for each."""
BLOCK = 4096

if HAS_TRITON:

    @triton.jit
    def _place(numbers, columns, inside):  # type: ignore[no-untyped-def]
        """Integers in the order of the numbers; of equal ones the first is larger."""
        numbers = tl.where(numbers == 0.0, 0.0, numbers)  # -0.0 equals 0.0.
        bits = numbers.to(tl.int32, bitcast=True)
        bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        bits = tl.where(numbers != numbers, 0x7FC00000, bits)  # NaN, as in `topk`.
        place = (bits.to(tl.int64) << 32) | (0x7FFFFFFF - columns).to(tl.int64)
        return tl.where(inside, place, -0x7FFFFFFFFFFFFFFF)

    @triton.jit(do_not_specialize=["top_k", "num_tokens"])
    def _top_tokens_kernel(  # type: ignore[no-untyped-def]
        logits_ptr,  # [R, vocabulary]
        tokens_ptr,  # [num_tokens]
        top_ptr,  # [R, top_k] int32
        numbers_ptr,  # [R, top_k]
        token_numbers_ptr,  # [R, num_tokens]
        log_sums_ptr,  # [R]
        stride,
        vocabulary,
        top_k,
        num_tokens,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        own = logits_ptr + row * stride
        lanes = tl.arange(0, BLOCK)
        highest = tl.full((BLOCK,), -float("inf"), tl.float32)
        for start in range(0, vocabulary, BLOCK):
            inside = start + lanes < vocabulary
            numbers = tl.load(own + start + lanes, mask=inside, other=-float("inf"))
            highest = tl.maximum(highest, numbers.to(tl.float32))
        most = tl.max(highest)
        most = tl.where(most == -float("inf"), 0.0, most)
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocabulary, BLOCK):
            inside = start + lanes < vocabulary
            numbers = tl.load(own + start + lanes, mask=inside, other=-float("inf"))
            sums += tl.exp(numbers.to(tl.float32) - most)
        tl.store(log_sums_ptr + row, most + tl.log(tl.sum(sums)))
        before = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
        for rank in range(top_k):
            best = tl.full((BLOCK,), -0x7FFFFFFFFFFFFFFF, tl.int64)
            for start in range(0, vocabulary, BLOCK):
                columns = start + lanes
                inside = columns < vocabulary
                numbers = tl.load(own + columns, mask=inside, other=0.0)
                places = _place(numbers.to(tl.float32), columns, inside)
                places = tl.where(places < before, places, -0x7FFFFFFFFFFFFFFF)
                best = tl.maximum(best, places)
            before = tl.max(best)
            token = 0x7FFFFFFF - (before & 0x7FFFFFFF).to(tl.int32)
            number = tl.load(own + token).to(tl.float32)
            tl.store(top_ptr + row * top_k + rank, token)
            tl.store(numbers_ptr + row * top_k + rank, number)
        for place in range(num_tokens):
            number = tl.load(own + tl.load(tokens_ptr + place)).to(tl.float32)
            at = row * num_tokens + place
            tl.store(token_numbers_ptr + at, number)


class Best(NamedTuple):
    """What a lens needs of rows of logits, or of a part of their columns."""

    ids: torch.Tensor  # [R, top_k] int32
    """The likeliest tokens; equal ones are in the order of their ids."""
    logits: torch.Tensor  # [R, top_k] float32
    """Theirs. NaN is larger than all numbers."""
    of_tokens: torch.Tensor  # [R, tokens] float32
    """The logits of given tokens."""
    log_sums: torch.Tensor  # [R, 1] float32
    """The logarithm of the sum of the exponentials of all logits."""

    def values(self) -> Arrays:
        """As `Head.lens_values`."""
        found: Arrays = {}
        if self.ids.shape[1]:
            found["token_ids"] = self.ids
            found["logprobs"] = self.logits - self.log_sums
        if self.of_tokens.shape[1]:
            found["token_logprobs"] = self.of_tokens - self.log_sums
        return found

    def packed(self) -> torch.Tensor:
        """All of it as `[R, n]` float32."""
        return torch.cat([self.ids.view(torch.float32), *self[1:]], dim=1)

    @classmethod
    def joined(cls, packed: torch.Tensor, top_k: int) -> "Best":
        """The best of all columns, of the parts that ranks have in ascending order.

        Args:
            packed: `[ranks, R, n]`, those of each rank.
            top_k: as of each part.

        """
        ids, logits = (
            packed[..., start : start + top_k].transpose(0, 1).flatten(1)
            for start in (0, top_k)
        )
        logits, order = logits.sort(dim=-1, descending=True, stable=True)
        ids = ids.view(torch.int32).gather(1, order[:, :top_k])
        of_tokens = packed[..., 2 * top_k : -1].amax(dim=0)
        log_sums = packed[..., -1:].logsumexp(dim=0)
        return cls(ids, logits[:, :top_k], of_tokens, log_sums)


def best_of(
    logits: torch.Tensor, top_k: int, tokens: tuple[int, ...], first: int = 0
) -> Best:
    """The best of rows of logits.

    Args:
        logits: `[R, columns]`, consecutive in a row.
        top_k: number of tokens, at most that of the columns.
        tokens: ids of further tokens. The logit of one of another rank is -inf.
        first: the token of the first column.

    """
    places, absent = _columns(tokens, first, logits.shape[1], logits.device)
    if logits.is_cuda and top_k <= MOST:
        found = top_tokens(logits, top_k, places)
    else:
        numbers = logits.float()
        ids, values = numbers[:, :0].int(), numbers[:, :0]
        if top_k:
            values, indices = largest(numbers, top_k)
            ids = indices.int()
        log_sums = numbers.logsumexp(dim=-1, keepdim=True)
        found = Best(ids, values, numbers[:, places], log_sums)
    if absent is not None:
        asked = found.of_tokens.masked_fill(absent, -torch.inf)
        found = found._replace(of_tokens=asked)
    return found._replace(ids=found.ids + first) if first else found


@lru_cache(maxsize=64)
def _columns(
    tokens: tuple[int, ...], first: int, count: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The columns of tokens, and which are not there; None if none."""
    places = [token - first for token in tokens]
    absent = [not 0 <= place < count for place in places]
    held = [0 if gone else place for place, gone in zip(places, absent)]
    at = torch.tensor(held, dtype=torch.int64, device=device)
    return at, torch.tensor(absent, device=device) if any(absent) else None


def top_tokens(logits: torch.Tensor, top_k: int, places: torch.Tensor) -> Best:
    """As `best_of`, by the kernel.

    Args:
        logits: `[R, columns]`, consecutive in a row, on a GPU.
        top_k: 0 to `MOST`, at most the number of columns.
        places: int64 `[n]`, the columns of further tokens.

    """
    rows, columns = logits.shape
    count = len(places)
    found = Best(
        logits.new_empty(rows, top_k, dtype=torch.int32),
        logits.new_empty(rows, top_k, dtype=torch.float32),
        logits.new_empty(rows, count, dtype=torch.float32),
        logits.new_empty(rows, 1, dtype=torch.float32),
    )
    if rows:
        _top_tokens_kernel[(rows,)](
            logits,
            places,
            *found,
            logits.stride(0),
            columns,
            top_k,
            count,
            BLOCK=BLOCK,
            num_warps=8,
        )
    return found


def largest(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest values of each row `[R, n]`, descending, and their indices.

    Equal values are in the order of their indices, and the first of the largest is
    always among them: logits in 16 bits are often equal, and greedy sampling takes that
    one. Which of those equal to the smallest are among the k is not defined.

    As `torch.topk`, which on a CPU takes 60 µs per row of 49,152 values. There the
    largest of each group of `GROUP` values is found first, and only the k groups with
    the largest of these are searched, which is seven times as fast.
    """
    count = values.shape[1]
    if values.is_cuda or count % GROUP or count < 4 * k * GROUP:
        return _topk(values, k)
    groups = values.unflatten(1, (-1, GROUP))
    _, best = _topk(groups.amax(dim=-1), k)  # [R, k]
    best = best.sort(dim=-1).values
    found = groups.gather(1, best[:, :, None].expand(-1, -1, GROUP)).flatten(1)
    top, where = _topk(found, k)
    group = best.gather(1, where // GROUP)
    return top, group * GROUP + where % GROUP


def _topk(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `torch.topk`, with equal values in the order of their indices."""
    first = values.argmax(dim=-1, keepdim=True)  # of equal values the first
    if k == 1:
        return values.gather(1, first), first
    where = values.topk(k, dim=-1).indices
    # If it is missing, the k are all equal to it.
    missing = (where != first).all(dim=-1, keepdim=True)
    where = torch.cat([torch.where(missing, first, where[:, :1]), where[:, 1:]], dim=-1)
    where = where.sort(dim=-1).values
    found = values.gather(1, where)
    order = found.argsort(dim=-1, descending=True, stable=True)
    return found.gather(1, order), where.gather(1, order)
