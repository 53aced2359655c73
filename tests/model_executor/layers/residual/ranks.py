# SPDX-License-Identifier: Apache-2.0
"""The ranks of `test_spread`, each with upstream's process groups.

    python -m tests.model_executor.layers.residual.ranks FOLDER RANKS...

Fails if a hook point over shares differs from one over all tokens on a rank.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.synchronize import Barrier

import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    init_distributed_environment,
    initialize_model_parallel,
    tensor_model_parallel_all_gather,
)
from vllm.model_executor.layers.residual import tap as residual_tap
from vllm.model_executor.layers.residual.capture_op import Launch
from vllm.model_executor.layers.residual.program import (
    Flag,
    Instruction,
    Kind,
    words_of,
)
from vllm.model_executor.layers.residual.tap import ResidualTap
from vllm.model_executor.models.utils import sequence_parallel_chunk

WIDTH, ROWS, VECTORS, BASE = 6, 40, 4, 3
MOST_TOKENS = 13
PADDING = 8
"""Rows after the batch's, which padding may reach, as in `WorkerSteering`."""
Pair = tuple[torch.Tensor, torch.Tensor | None]


@dataclass
class Step:
    """A random step: the whole stream, and the operations of its hook point."""

    hidden: torch.Tensor  # [T, H]
    residual: torch.Tensor | None
    tap: ResidualTap
    kept: Sequence[torch.Tensor] = ()
    """What the addresses in the index refer to."""

    @property
    def num_tokens(self) -> int:
        return len(self.hidden)

    def whole(self) -> Pair:
        """The result of a hook point for all tokens in one process."""
        return self.tap(self.hidden, self.residual)

    def shares(self) -> Pair:
        """This rank's share of the stream, split by upstream's function."""
        return sequence_parallel_chunk(self.hidden), (
            None if self.residual is None else sequence_parallel_chunk(self.residual)
        )

    def gathered(self, pair: Pair) -> torch.Tensor:
        """Gather the stream `[T, H]` of all ranks; checks that padding is unchanged."""
        hidden, residual = pair
        stream = hidden if residual is None else hidden + residual
        whole = tensor_model_parallel_all_gather(stream.contiguous(), 0)
        assert (whole[self.num_tokens :] == 0).all(), "padding was changed"
        return whole[: self.num_tokens]


def step(seed: int, dtype: torch.dtype, full: bool = False) -> Step:
    """A random step, equal on all ranks; `full` if it has as many tokens as slots."""
    torch.manual_seed(seed)
    tokens = MOST_TOKENS if full else int(torch.randint(1, MOST_TOKENS, ()))
    hidden = torch.randn(tokens, WIDTH).to(dtype)
    residual = torch.randn(tokens, WIDTH).to(dtype) if seed % 3 else None
    slots = torch.full((MOST_TOKENS, 2), -1, dtype=torch.int32)
    wanted = torch.rand(tokens) < 0.6
    if get_tensor_model_parallel_rank() == 0:
        places = torch.randperm(ROWS, generator=torch.Generator())[:tokens].int()
        slots[:tokens, 1] = torch.where(wanted, places, -1)
    table = torch.randn(VECTORS, WIDTH).to(dtype)
    table[0] = -0.0
    rows = torch.zeros(MOST_TOKENS + PADDING, dtype=torch.int32)
    rows[:tokens] = torch.randint(VECTORS, (tokens,)).int()
    staging = torch.zeros(ROWS + BASE, WIDTH, dtype=dtype)
    base = torch.tensor([BASE], dtype=torch.int32)
    index = torch.zeros(VECTORS, dtype=torch.int64)
    gates = torch.zeros(MOST_TOKENS + PADDING, 4)
    tap = ResidualTap(slots[:, 1], base, staging, table, rows, index, rows, gates)
    Launch.taps = frozenset(
        {slots[:, 1].data_ptr(), table.data_ptr(), index.data_ptr()}
    )
    return Step(hidden, residual, tap)


def add_programs(one: Step, seed: int) -> None:
    """Add programs for random tokens of a step."""
    torch.manual_seed(seed)
    u, v = torch.randn(2, 1, WIDTH)
    replace = Instruction(Kind.REPLACE, v, c0=1.5)
    project = Instruction(Kind.LINEAR, u / u.norm(), flags=Flag.DOT, c2=-1.5)
    order = torch.randperm(one.num_tokens)
    assert one.tap.index is not None and one.tap.rows is not None
    programs = [
        torch.from_numpy(words_of(program))
        for program in ((replace, project), (project,))
    ]
    one.kept = [*programs, v, project.read]
    one.tap.program_rows = torch.zeros_like(one.tap.rows)
    one.tap.program_rows[: one.num_tokens] = 1 + (order > seed % 4).int()
    for row, words in enumerate(programs, 1):
        one.tap.index[row] = words.data_ptr()


def taken(one: Step, visit: Callable[[], Pair]) -> tuple[Pair, torch.Tensor]:
    """The result of a visit, and the rows that it copied."""
    assert one.tap.staging is not None
    one.tap.staging.zero_()
    return visit(), one.tap.staging.clone()


def check(one: Step, visit: Callable[[torch.Tensor, torch.Tensor | None], Pair]) -> int:
    """Check that a visit with shares equals one with all tokens."""
    share = one.shares()
    (hidden, residual), rows = taken(one, one.whole)
    expected = hidden if residual is None else hidden + residual
    found, copied = taken(one, lambda: visit(*share))
    torch.testing.assert_close(one.gathered(found), expected)
    assert torch.equal(copied, rows), "other rows were captured"
    return int((rows != 0).any(1).sum())


def run(rank: int, ranks: int, folder: str, done: Barrier) -> None:
    """Join the other ranks and check random steps."""
    # Different host names: upstream then uses gloo, whose ranks wait without using a
    # core.
    os.environ["VLLM_DIST_IDENT"] = f"{os.getpid()}"
    with set_current_vllm_config(VllmConfig()):
        store = f"file://{folder}/store-{ranks}"
        init_distributed_environment(ranks, rank, store, rank, "gloo")
        initialize_model_parallel(ranks)
    captured = 0
    compiled = torch.compile(
        lambda tap, *pair: tap.on_split(*pair),
        backend="aot_eager",
        dynamic=True,
        fullgraph=True,
    )
    for seed in range(20):
        dtype = (torch.float32, torch.bfloat16)[seed % 2]
        captured += check(one := step(seed, dtype, full=seed > 15), one.tap.on_split)
        add_programs(one, seed)
        check(one, one.tap.on_split)
    for seed in range(4):
        one = step(seed, torch.float32)
        add_programs(one, seed)
        check(one, lambda *pair, tap=one.tap: compiled(tap, *pair))  # type: ignore[misc]
    assert (captured > 40) == (rank == 0), f"rank {rank} took {captured} rows"
    check_lone()
    check_idle()
    done.wait()  # A rank that exits would close connections that others still read.


def check_lone() -> None:
    """The share of a single token reaches all ranks; other shares stay."""
    layer = torch.nn.Module()
    layer.residual_taps = {}  # type: ignore[assignment]
    for tokens in (1, 5):
        torch.manual_seed(tokens)
        whole = torch.randn(2, tokens, WIDTH)
        given = tuple(sequence_parallel_chunk(half) for half in whole)
        found = residual_tap.lone_token(layer, tokens, *given)
        for one, before, half in zip(found, given, whole, strict=True):
            assert torch.equal(one, half) if tokens == 1 else one is before


def check_idle() -> None:
    """If nothing launches, no rank waits for another: only rank 0 runs this."""
    one = step(1, torch.float32)
    share = one.shares()
    Launch.taps = frozenset()
    if get_tensor_model_parallel_rank() == 0:
        found, rows = taken(one, lambda: one.tap.on_split(*share))
        assert found[0] is share[0] and found[1] is share[1]
        assert (rows == 0).all()


def main(ranks: int, folder: str) -> None:
    """Fork the ranks from this process, because importing takes longer than they do."""
    context = multiprocessing.get_context("fork")
    done = context.Barrier(ranks)
    started = [
        context.Process(target=run, args=(rank, ranks, folder, done))
        for rank in range(ranks)
    ]
    for process in started:
        process.start()
    # Polled in turns, because a rank may end at any time.
    while running := [one.sentinel for one in started if one.exitcode is None]:
        wait(running)
        if any(process.exitcode for process in started):
            for process in started:
                process.terminate()  # It would wait for the rank that failed.
    if any(process.exitcode for process in started):
        sys.exit(f"of {ranks} ranks one failed")


if __name__ == "__main__":
    for number in sys.argv[2:]:
        main(int(number), sys.argv[1])
