# SPDX-License-Identifier: Apache-2.0
from typing import ClassVar

import torch
from torch import nn

from vllm.model_executor.layers.residual import tap as residual_tap
from vllm.v1.worker.inner_points import why_missing


@residual_tap.tapped("pre_attn", "post_block")
class Layer(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Inherits(Layer):
    """Keeps the woven forward."""


class Overrides(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Counting:
    """A tap that replaces the stream."""

    def __call__(self, hidden, residual):  # type: ignore[no-untyped-def]
        return hidden + 10, residual


def test_a_layer_has_the_points_that_its_forward_calls() -> None:
    assert residual_tap.hook_points(Layer()) == ("pre_attn", "post_block")
    assert residual_tap.hook_points(Inherits()) == ("pre_attn", "post_block")


def test_a_forward_that_is_not_the_woven_one_has_no_points() -> None:
    assert residual_tap.hook_points(Overrides()) == ()
    assert residual_tap.hook_points(nn.Linear(1, 1)) == ()


class Sparse(Layer):
    hook_points_lacking: ClassVar = {"post_block": "it has experts"}


def test_a_layer_lacks_the_points_that_only_others_of_its_class_have() -> None:
    assert residual_tap.hook_points(Sparse()) == ("pre_attn",)
    assert why_missing({0: Sparse()}, ["post_block"], 1) == {
        "post_block": "it has experts"
    }


def test_without_taps_the_calls_return_their_arguments() -> None:
    hidden, residual = torch.ones(1), torch.zeros(1)
    layer = Layer()
    assert residual_tap.pair(layer, "pre_attn", hidden, residual)[0] is hidden
    assert residual_tap.partial(layer, "pre_attn", hidden, residual)[1] is residual
    assert residual_tap.stream(layer, "pre_attn", hidden) is hidden


def test_taps_belong_to_one_layer_and_one_point() -> None:
    one, other, x = Layer(), Layer(), torch.ones(1)
    residual_tap.attach(one, "pre_attn", Counting())  # type: ignore[arg-type]
    assert residual_tap.stream(one, "pre_attn", x).item() == 11
    assert residual_tap.stream(one, "post_block", x) is x
    assert residual_tap.stream(other, "pre_attn", x) is x
    assert Layer.residual_taps is None  # type: ignore[attr-defined]


def test_each_run_of_a_layer_has_taps_of_its_own() -> None:
    layer, x = Layer(), torch.ones(1)
    residual_tap.attach(layer, "pre_attn", Counting(), run=2)  # type: ignore[arg-type]
    assert residual_tap.stream(layer, "pre_attn", x, run=2).item() == 11
    assert residual_tap.stream(layer, "pre_attn", x, run=1) is x
    assert residual_tap.stream(layer, "pre_attn", x) is x


class Recording(Counting):
    """A tap that keeps the rows that it is given."""

    def __call__(self, hidden, residual):  # type: ignore[no-untyped-def]
        assert residual is None and hidden.is_contiguous()
        self.rows = hidden
        return super().__call__(hidden, residual)


def test_a_row_of_several_streams_has_them_one_after_the_other() -> None:
    layer, tap = Layer(), Recording()
    tokens, streams, width = 3, 2, 5
    given = torch.randn(tokens, streams, width)
    rows = given.flatten(1)
    assert residual_tap.streams(layer, "pre_attn", given) is given
    assert residual_tap.streams_first(layer, "pre_attn", given) is given
    residual_tap.attach(layer, "pre_attn", tap)  # type: ignore[arg-type]
    for form in (given, rows):
        changed = residual_tap.streams(layer, "pre_attn", form)
        assert torch.equal(tap.rows, rows)
        assert torch.equal(changed, form + 10)
    for first in (given.transpose(0, 1), given.transpose(0, 1).contiguous()):
        changed = residual_tap.streams_first(layer, "pre_attn", first)
        assert torch.equal(tap.rows, rows)
        assert torch.equal(changed, first + 10) and changed.is_contiguous()
