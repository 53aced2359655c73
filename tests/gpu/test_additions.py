# SPDX-License-Identifier: Apache-2.0
"""The ops that add vectors, on a GPU: their kernel, and in parallel in a graph."""

import pytest
import torch

from vllm.model_executor.layers.residual import steer_op
from vllm.model_executor.layers.residual.capture_op import Launch
from vllm.model_executor.layers.residual.steer_op import EarlyAdditions

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_engine")]

VECTORS = 5
Addition = tuple[torch.Tensor, torch.Tensor]


def addition(tokens: int, width: int, dtype: torch.dtype) -> Addition:
    table = torch.randn(VECTORS, width, device="cuda").to(dtype)
    table[0] = -0.0
    rows = torch.randint(VECTORS, (tokens + 3,), dtype=torch.int32, device="cuda")
    return table, rows


def added(target: torch.Tensor, *additions: Addition) -> torch.Tensor:
    """`target` plus the vectors, added one by one in double precision."""
    for table, rows in additions:
        vectors = table[rows[: len(target)].long()].double()
        target = (target.double() + vectors).to(target.dtype)
    return target


def launching(*additions: Addition) -> None:
    Launch.taps = frozenset(table.data_ptr() for table, _ in additions)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(("tokens", "width"), [(4, 64), (33, 6144), (130, 6144)])
@pytest.mark.parametrize("places", [[None], [False, True]])
def test_what_is_begun_beside_other_kernels_is_there_in_its_turn(
    count: int, tokens: int, width: int, places: list[bool | None]
) -> None:
    """Each replay gives the result of additions in their original places."""
    target = torch.zeros(tokens, width, device="cuda", dtype=torch.bfloat16)
    branch = torch.zeros_like(target)
    additions = [addition(tokens, width, target.dtype) for _ in range(count)]
    tables, rows = map(list, zip(*additions, strict=True))
    launching(*additions)
    weight = torch.randn(width, width, device="cuda", dtype=torch.bfloat16) * 0.02
    total = torch.zeros_like(target)

    def layer() -> None:
        target.copy_(branch + 1.0)
        product = branch
        for late in places:
            product = product @ weight
            begin = torch.ops.vllm.steer_rows_ahead
            begin(target, tables, rows, [], product, late)
        for _ in range(3 - len(places)):
            product = product @ weight
        for table, row in additions:
            torch.ops.vllm.steer_rows(target, table, row, product)
        total.copy_(target + product)

    def expected() -> torch.Tensor:
        product = ((branch @ weight) @ weight) @ weight
        return added(branch + 1.0, *additions) + product

    layer()  # Compiles the kernels.
    graph = torch.cuda.CUDAGraph()
    Launch.whole = True
    with torch.cuda.graph(graph):
        for _ in range(3):
            layer()
    Launch.whole = False
    assert not EarlyAdditions.begun
    for _ in range(5):
        branch.normal_()
        for table, row in additions:
            table[1:].normal_()
            row.random_(0, VECTORS)
        graph.replay()
        assert torch.equal(total, expected())


@pytest.mark.parametrize(("tokens", "width"), [(1, 2048), (8, 4096), (256, 4096)])
def test_a_kernel_that_begins_early_waits_for_the_stream(
    tokens: int, width: int
) -> None:
    """After a copy, a product and another addition, each sees the earlier results."""
    stream = torch.zeros(tokens, width, device="cuda", dtype=torch.bfloat16)
    source = torch.zeros_like(stream)
    weight = torch.randn(width, width, device="cuda", dtype=torch.bfloat16) * 0.02
    additions = [addition(tokens, width, stream.dtype) for _ in range(2)]
    slots = torch.arange(tokens, dtype=torch.int32, device="cuda").flip(0)
    base = torch.zeros(1, dtype=torch.int32, device="cuda")
    rounds = 6
    staging = [torch.zeros_like(stream) for _ in range(2 * rounds)]
    Launch.taps = frozenset(
        [slots.data_ptr(), *(table.data_ptr() for table, _ in additions)]
    )

    def run() -> None:
        stream.copy_(source)
        for number in range(rounds):
            for place, (table, row) in enumerate(additions):
                torch.ops.vllm.steer_rows(stream, table, row, None)
                torch.ops.vllm.capture_rows(
                    stream, None, slots, base, staging[2 * number + place], False
                )
            torch.mm(staging[2 * number + 1].flip(0), weight, out=stream)

    run()  # Compiles the kernels.
    graph = torch.cuda.CUDAGraph()
    Launch.whole = True
    with torch.cuda.graph(graph):
        run()
    Launch.whole = False
    for _ in range(20):
        source.normal_()
        graph.replay()
        expected = source
        for number in range(rounds):
            for place, one in enumerate(additions):
                expected = added(expected, one)
                assert torch.equal(staging[2 * number + place].flip(0), expected)
            expected = expected @ weight
        assert torch.equal(stream, expected)


def test_a_pass_that_is_no_recording_begins_nothing() -> None:
    target = torch.zeros(4, 64, device="cuda")
    one = addition(4, 64, target.dtype)
    launching(one)
    Launch.whole = True
    torch.ops.vllm.steer_rows_ahead(target, [one[0]], [one[1]], [], None, None)
    assert not EarlyAdditions.begun
    assert (target == 0).all()


def test_what_is_begun_is_never_on_the_stream_that_records() -> None:
    """PyTorch hands out 32 streams in turn."""
    target = torch.zeros(4, 64, device="cuda")
    beside = steer_op._side_stream(target.device)
    for _ in range(40):
        assert torch.cuda.Stream() != beside
