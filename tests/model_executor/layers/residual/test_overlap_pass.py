# SPDX-License-Identifier: Apache-2.0
"""Graphs with early additions, compared with the unchanged model."""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.nn.functional import linear

from tests.model_executor.layers.residual.tracing import traced, treated
from tests.support.compiler import needs_compiler
from vllm.model_executor.layers.residual import steer_op
from vllm.model_executor.layers.residual.capture_op import Launch
from vllm.model_executor.layers.residual.overlap_pass import begin_additions_early
from vllm.model_executor.layers.residual.steer_op import EarlyAdditions
from vllm.model_executor.layers.residual.tap import ResidualTap

WIDTH, TOKENS, VECTORS = 8, 5, 4
HOOKS = ("pre_attn", "post_attn", "post_block")
pytestmark = [pytest.mark.usefixtures("no_engine"), needs_compiler]


class Layer(nn.Module):
    """Attention and MLP stand-ins around the norms that carry the pair."""

    def __init__(self, captures: bool, kind: str) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            [torch.randn(WIDTH, WIDTH) * 0.3 for _ in range(4)]
        )
        self.kind = kind
        self.taps = {hook: make_tap(captures) for hook in HOOKS}

    def norm(
        self, hidden: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.kind == "in place":
            residual.add_(hidden)
            summed = residual
        else:
            summed = residual = hidden + residual
        # The next lines read the residual's memory.
        scale = torch.rsqrt(summed.pow(2).mean(-1, keepdim=True) + 1e-5)
        return summed * scale, residual

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, residual = self.taps["pre_attn"](hidden, residual)
        if residual is None:
            residual = hidden
            hidden = hidden * 0.5
        else:
            hidden, residual = self.norm(hidden, residual)
        hidden = linear(linear(hidden, self.weights[0]).tanh(), self.weights[1])
        hidden, residual = self.taps["post_attn"](hidden, residual)
        hidden, residual = self.norm(hidden, residual)
        hidden = linear(hidden, self.weights[2]).tanh()
        if self.kind == "reads late":
            hidden = hidden + residual.view(-1, WIDTH) * 0.1
        hidden = linear(hidden, self.weights[3])
        return self.taps["post_block"](hidden, residual)


def make_tap(captures: bool) -> ResidualTap:
    table = torch.randn(VECTORS, WIDTH)
    table[0] = -0.0
    rows = torch.randint(VECTORS, (TOKENS,), dtype=torch.int32)
    if not captures:
        return ResidualTap(None, None, None, table, rows)
    slots = torch.randperm(TOKENS).to(torch.int32)
    base, staging = torch.zeros(1, dtype=torch.int32), torch.zeros(TOKENS, WIDTH)
    return ResidualTap(slots, base, staging, table, rows)


class Model(nn.Module):
    """A sequence of layers."""

    def __init__(self, layers: int, captures: bool, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(captures, kind) for _ in range(layers)])

    def taps(self) -> list[ResidualTap]:
        return [self.layers[i].taps[h] for i in range(len(self.layers)) for h in HOOKS]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        residual = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual)
        return hidden + residual


def names(graph: fx.Graph) -> list[str]:
    """Products, activations and ops of taps, in order."""
    found = (getattr(n.target, "__name__", str(n.target)) for n in graph.nodes)
    kept = ("linear", "tanh", "steer_rows", "steer_rows_ahead", "capture_rows")
    return [one for one in found if one in kept]


def steered(tap: ResidualTap) -> int:
    assert tap.table is not None
    return tap.table.data_ptr()


def captured(tap: ResidualTap) -> int:
    assert tap.slots is not None
    return tap.slots.data_ptr()


@given(st.data())
@settings(max_examples=12)
def test_what_is_begun_early_is_what_the_model_says(data: st.DataObject) -> None:
    captures = data.draw(st.booleans(), label="captures")
    kind = data.draw(st.sampled_from(["plain", "in place", "reads late"]))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    model = Model(data.draw(st.integers(1, 3)), captures, kind)
    taps = model.taps()
    hidden = torch.randn(TOKENS, WIDTH)
    early: list[int] = []
    module = traced(model, lambda graph: early.append(treated(graph)))
    for _ in range(4):
        wide = data.draw(st.booleans(), label="begins late")
        wanted = [steered(tap) for tap in taps if data.draw(st.booleans())]
        if captures:
            wanted += [captured(tap) for tap in taps if data.draw(st.booleans())]
        found, expected = (
            outcome(run, taps, hidden, frozenset(wanted), wide)
            for run in (module, model)
        )
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)
    assert early and early[0] > 0, "nothing began early"


@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize("kind", ["plain", "in place"])
def test_compiled_to_the_end_it_is_what_the_model_says(
    captures: bool, kind: str
) -> None:
    torch.manual_seed(3)
    model = Model(2, captures, kind)
    taps, hidden = model.taps(), torch.randn(TOKENS, WIDTH)
    module = traced(model, treated, compiled=True)
    steers = [steered(tap) for tap in taps]
    captured_too = [captured(tap) for tap in taps[1::2]] if captures else []
    for wanted in (steers, steers[::2], [*steers, *captured_too], []):
        for wide in (False, True):
            found, expected = (
                outcome(run, taps, hidden, frozenset(wanted), wide)
                for run in (module, model)
            )
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, theirs)


def outcome(
    run: Callable[[torch.Tensor], torch.Tensor],
    taps: Sequence[ResidualTap],
    hidden: torch.Tensor,
    launches: frozenset[int],
    wide: bool,
) -> list[torch.Tensor]:
    """The outputs and captures of a pass, treated as recorded."""
    for tap in taps:
        if tap.staging is not None:
            tap.staging.zero_()
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(steer_op, "_recording", lambda: True)
        patch.setattr(steer_op, "WIDE", WIDTH if wide else 2 * WIDTH)
        Launch.taps, Launch.whole = launches, True
        found = [run(hidden.clone())]
    assert not EarlyAdditions.begun
    return found + [t.staging.clone() for t in taps if t.staging is not None]


def graphs_of(model: Model) -> tuple[list[str], list[str]]:
    """The nodes of its graph before and after the pass."""
    seen: list[list[str]] = []

    def change(graph: fx.Graph) -> None:
        seen.append(names(graph))
        treated(graph)
        seen.append(names(graph))
        assert begin_additions_early(graph, "cpu") == 0, "treated twice"

    traced(model, change)(torch.randn(TOKENS, WIDTH))
    return seen[0], seen[1]


def test_they_begin_behind_the_first_product_or_before_the_last() -> None:
    """Neighbouring additions start together."""
    before, after = graphs_of(Model(2, captures=False, kind="plain"))
    assert "steer_rows_ahead" not in before
    begin = "steer_rows_ahead"
    part = ["linear", begin, "tanh", begin, "linear", "steer_rows"]
    # The second layer's first addition starts with the previous one.
    first = second = ["steer_rows", *part, *part]
    assert after == [*first, *second]


def test_captures_in_between_say_whether_it_may_begin() -> None:
    taken: list[tuple[int, int]] = []

    def change(graph: fx.Graph) -> None:
        treated(graph)
        ahead = torch.ops.vllm.steer_rows_ahead
        taken.extend(
            (len(node.args[1]), len(node.args[3]))
            for node in graph.nodes
            if node.target is ahead and not node.args[5]
        )

    model = Model(2, captures=True, kind="plain")
    traced(model, change)(torch.randn(TOKENS, WIDTH))
    # Two block ends: only the first is followed by a layer, with a capture.
    assert taken == [(1, 1), (2, 2), (1, 1), (1, 1)]


def test_beside_a_single_product_they_begin_before_it() -> None:
    _, after = graphs_of(Model(1, captures=False, kind="reads late"))
    block = ["linear", "tanh", "steer_rows_ahead", "linear", "steer_rows"]
    assert after[-5:] == block


def test_on_a_cpu_every_addition_stays_where_it_is() -> None:
    found: list[int] = []
    change = lambda graph: found.append(begin_additions_early(graph))  # noqa: E731
    traced(Model(1, captures=False, kind="plain"), change)(torch.randn(TOKENS, WIDTH))
    assert found == [0]
