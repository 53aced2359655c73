# SPDX-License-Identifier: Apache-2.0
"""Compiled code writes to a copy of a layer's own rows only."""

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from torch._inductor.fx_passes import post_grad

from vllm.model_executor.layers.residual.capture_op import Launch
from vllm.model_executor.layers.residual.inductor_guard import guard_copies
from vllm.model_executor.layers.residual.program import Instruction, Kind, words_of
from vllm.model_executor.layers.residual.tap import ResidualTap

pytestmark = pytest.mark.usefixtures("no_engine")


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    with (
        patch.object(post_grad, "same_meta", post_grad.same_meta),
        torch._inductor.config.patch(force_disable_caches=True),
    ):
        yield


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_copy_of_a_view_is_one_of_its_own_rows(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory after the view's base belongs to another tensor."""
    width = 32
    program = (Instruction(Kind.LINEAR, torch.randn(1, width), c0=1.0),)
    words = torch.from_numpy(words_of(program))
    index, gates = torch.tensor([0, words.data_ptr()]), torch.zeros(tokens, 4)
    rows = (torch.arange(tokens, dtype=torch.int32) + 1) % 2
    tap = ResidualTap(index=index, program_rows=rows, gates=gates)
    monkeypatch.setattr(Launch, "taps", frozenset({index.data_ptr()}))
    weight, given = torch.randn(width, width), torch.randn(3, tokens, width)

    def layer(three: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return tap(three[0] @ weight, three[1].clone())

    guard_copies()
    guard_copies()  # As for another engine of the process.
    with torch.no_grad():
        expected, found = layer(given), torch.compile(layer, fullgraph=True)(given)
    for eager, compiled in zip(expected, found, strict=True):
        torch.testing.assert_close(compiled, eager)
