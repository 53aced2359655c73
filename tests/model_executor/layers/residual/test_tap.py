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
