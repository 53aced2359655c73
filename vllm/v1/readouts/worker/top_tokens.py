# SPDX-License-Identifier: Apache-2.0
"""The likeliest tokens of rows of logits and their log-probabilities.

One launch of a kernel finds them. Operations of PyTorch need some 30 launches for it,
and a float32 copy of the logits. On two H100s a lens for eight of 32 requests had 0.877
of upstream's throughput with these and has 0.896, with all that changed beside it; the
kernel alone was not measured.

Each tensor-parallel rank finds the likeliest of the tokens whose logits it computes.
"""

from functools import lru_cache

import numpy as np
import torch

from vllm.triton_utils import HAS_TRITON, tl, triton
from vllm.v1.residual.readout_plan import Array

BEST = "best"
"""Name of the array that `lens_arrays` takes."""
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

    @triton.jit(do_not_specialize=["first", "top_k", "num_tokens"])
    def _top_tokens_kernel(  # type: ignore[no-untyped-def]
        logits_ptr,  # [R, columns]
        places_ptr,  # [num_tokens]
        out_ptr,  # [R, 2 * top_k + num_tokens + 1]
        stride,
        columns,
        first,
        top_k,
        num_tokens,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        own = logits_ptr + row * stride
        out = out_ptr + row * (2 * top_k + num_tokens + 1)
        lanes = tl.arange(0, BLOCK)
        highest = tl.full((BLOCK,), -float("inf"), tl.float32)
        for start in range(0, columns, BLOCK):
            inside = start + lanes < columns
            numbers = tl.load(own + start + lanes, mask=inside, other=-float("inf"))
            highest = tl.maximum(highest, numbers.to(tl.float32))
        most = tl.max(highest)
        most = tl.where(most == -float("inf"), 0.0, most)
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, columns, BLOCK):
            inside = start + lanes < columns
            numbers = tl.load(own + start + lanes, mask=inside, other=-float("inf"))
            sums += tl.exp(numbers.to(tl.float32) - most)
        tl.store(out + 2 * top_k + num_tokens, most + tl.log(tl.sum(sums)))
        before = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
        for rank in range(top_k):
            best = tl.full((BLOCK,), -0x7FFFFFFFFFFFFFFF, tl.int64)
            for start in range(0, columns, BLOCK):
                at = start + lanes
                inside = at < columns
                numbers = tl.load(own + at, mask=inside, other=0.0)
                places = _place(numbers.to(tl.float32), at, inside)
                places = tl.where(places < before, places, -0x7FFFFFFFFFFFFFFF)
                best = tl.maximum(best, places)
            before = tl.max(best)
            column = 0x7FFFFFFF - (before & 0x7FFFFFFF).to(tl.int32)
            token = (column + first).to(tl.int32).to(tl.float32, bitcast=True)
            tl.store(out + rank, token)
            tl.store(out + top_k + rank, tl.load(own + column).to(tl.float32))
        for number in range(num_tokens):
            place = tl.load(places_ptr + number)
            asked = tl.load(own + place, mask=place >= 0, other=-float("inf"))
            tl.store(out + 2 * top_k + number, asked.to(tl.float32))


def best_of(
    logits: torch.Tensor, top_k: int, tokens: tuple[int, ...], first: int = 0
) -> torch.Tensor:
    """What a lens needs of rows of logits, or of a part of their columns.

    Args:
        logits: `[R, columns]`, consecutive in a row.
        top_k: number of tokens, at most that of the columns.
        tokens: ids of further tokens. The logit of one of another rank is -inf.
        first: the token of the first column.

    Returns:
        `[R, 2 * top_k + len(tokens) + 1]` float32: the likeliest tokens (the bits of
        int32; equal ones in the order of their ids), their logits (NaN is larger than
        all numbers), those of `tokens`, and the logarithm of the sum of the
        exponentials of all logits.

    """
    places = _columns(tokens, first, logits.shape[1], logits.device)
    if logits.is_cuda and top_k <= MOST:
        return top_tokens(logits, top_k, places, first)
    numbers = logits.float()
    ids, values = numbers[:, :0].int(), numbers[:, :0]
    if top_k:
        values, indices = largest(numbers, top_k)
        ids = indices.int() + first
    asked = numbers[:, places.clamp(min=0)].masked_fill(places < 0, -torch.inf)
    log_sums = numbers.logsumexp(dim=-1, keepdim=True)
    return torch.cat([ids.view(torch.float32), values, asked, log_sums], dim=1)


@lru_cache(maxsize=64)
def _columns(
    tokens: tuple[int, ...], first: int, count: int, device: torch.device
) -> torch.Tensor:
    """The columns of tokens, -1 of those that are not there."""
    places = [token - first for token in tokens]
    held = [place if 0 <= place < count else -1 for place in places]
    return torch.tensor(held, dtype=torch.int64, device=device)


def top_tokens(
    logits: torch.Tensor, top_k: int, places: torch.Tensor, first: int = 0
) -> torch.Tensor:
    """As `best_of`, by the kernel.

    Args:
        logits: `[R, columns]`, consecutive in a row, on a GPU.
        top_k: 0 to `MOST`, at most the number of columns.
        places: int64 `[n]`, the columns of further tokens, or -1.
        first: the token of the first column.

    """
    rows, columns = logits.shape
    size = 2 * top_k + len(places) + 1
    found = logits.new_empty(rows, size, dtype=torch.float32)
    if rows:
        _top_tokens_kernel[(rows,)](
            logits,
            places,
            found,
            logits.stride(0),
            columns,
            first,
            top_k,
            len(places),
            BLOCK=BLOCK,
            num_warps=8,
        )
    return found


def lens_arrays(best: Array, top_k: int) -> dict[str, Array]:
    """The arrays of a lens, of what `best_of` has found in all columns.

    On the host, where these few numbers take less time than launching it would: some
    15 operations of a GPU took 0.4 ms of the engine's thread, with a profiler.

    Args:
        best: `[ranks, R, numbers]` float32, of ranks with ascending columns.
        top_k: as of each rank.

    Returns:
        `token_ids` int32 and `logprobs` float32 `[R, top_k]` if `top_k`, and
        `token_logprobs` float32 `[R, tokens]` if there are further tokens.

    """
    whole = best[0] if len(best) == 1 else _over_ranks(best, top_k)
    with np.errstate(invalid="ignore"):  # Of what is no number, NaN is the result.
        values = whole[:, top_k:-1] - whole[:, -1:]
    found: dict[str, Array] = {}
    if top_k:
        found["token_ids"] = whole[:, :top_k].view(np.int32)
        found["logprobs"] = values[:, :top_k]
    if values.shape[1] > top_k:
        found["token_logprobs"] = values[:, top_k:]
    return found


def _over_ranks(best: Array, top_k: int) -> Array:
    """What one rank with all columns would have found, `[R, numbers]`."""
    ids, numbers = (
        np.concatenate(best[..., start : start + top_k], axis=-1)
        for start in (0, top_k)
    )
    order = np.argsort(-numbers, axis=-1, kind="stable")[:, :top_k]
    rows = np.arange(len(order))[:, None]
    with np.errstate(invalid="ignore"):
        sums = np.logaddexp.reduce(best[..., -1:], axis=0)
    asked = best[..., 2 * top_k : -1].max(axis=0)
    return np.concatenate((ids[rows, order], numbers[rows, order], asked, sums), -1)


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
