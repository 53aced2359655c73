# SPDX-License-Identifier: Apache-2.0
"""The modules that get hook points, in models of a few linear layers."""

from typing import Any

import pytest
import torch
from torch import nn

from vllm.model_executor.layers.residual import tap
from vllm.model_executor.models.falcon_h1 import FalconH1SSMDecoderLayer
from vllm.model_executor.models.gemma3n import Gemma3nDecoderLayer
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.v1.residual.tap import MLP_POINTS
from vllm.v1.worker.inner_points import shapes_of, why_missing
from vllm.v1.worker.tapped_layers import TappedLayers, find_tapped_layers

POINTS = ["pre_attn", "post_attn", "post_block"]


class Late(nn.Module):
    """A layer that is not part of a release."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = hidden_states + self.attn(hidden_states)
        return hidden_states + self.mlp(hidden_states)


class Strange(nn.Module):
    """A layer whose analysis fails."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.gadget(hidden_states)  # type: ignore[no-any-return]


@tap.tapped("pre_attn", "post_block", "mlp_in", "mlp_out")
class Woven(nn.Module):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


@tap.tapped("mlp_out", "mlp_add", partial=("mlp_add",))
class Adding(nn.Module):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


class Conditional(Woven):
    hook_points_unless = ("several streams",)


class Doubled(Woven):
    """A model with as many attention modules as its decoder has layers."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleList([Strange(), Strange()])


class Decoder(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


class Wrapper(nn.Module):
    def __init__(self, decoder: nn.Module, encoder: nn.Module) -> None:
        super().__init__()
        self.decoder, self.encoder = decoder, encoder

    def get_language_model(self) -> nn.Module:
        return self.decoder


def find(model: nn.Module, num_layers: int = 2, **options: Any) -> TappedLayers:
    chosen: dict[str, Any] = {"optional": (), "weaves": True} | options
    return find_tapped_layers(model, num_layers=num_layers, **chosen)


def test_layers_that_no_release_holds_are_woven() -> None:
    layers = find(Decoder(Late(), Late()))
    assert layers.refusals == ()
    assert layers.points == {0: POINTS, 1: POINTS}


def test_without_a_feature_nothing_is_woven() -> None:
    model = Decoder(Late(), Strange())
    assert find(model, weaves=False) == TappedLayers({}, ())
    assert [type(layer) for layer in model.layers] == [Late, Strange]


def test_a_layer_that_is_not_understood_is_named_with_the_reason() -> None:
    layers = find(Decoder(Late(), Strange()))
    (refusal,) = layers.refusals
    assert refusal.startswith(f"{__name__}.Strange: ")
    assert "self.gadget" in refusal
    assert layers.points == {0: POINTS}


def test_a_refused_layer_of_the_release_has_the_build_s_reason() -> None:
    refused = FalconH1SSMDecoderLayer.__new__(FalconH1SSMDecoderLayer)
    nn.Module.__init__(refused)
    (refusal,) = find(Decoder(refused, refused)).refusals
    assert refusal.startswith("FalconH1SSMDecoderLayer: a part of a block")


def gemma3n() -> nn.Module:
    layer = Gemma3nDecoderLayer.__new__(Gemma3nDecoderLayer)
    nn.Module.__init__(layer)
    layer.altup = nn.Module()
    layer.altup.altup_num_inputs = 4
    return layer


def test_a_layer_of_several_streams_says_how_many() -> None:
    layers = find(Decoder(gemma3n(), gemma3n()))
    assert layers.refusals == ()
    assert layers.points == {n: ["streams_pre", "streams_post"] for n in (0, 1)}
    assert layers.streams == {0: 4, 1: 4}
    assert layers.blocks.keys() == {0, 1}
    assert find(Decoder(Late(), Late())).streams == {}
    whole = {"streams_pre": (32, 4), "streams_post": (32, 4)}
    assert shapes_of({}, layers.streams, 8) == {0: whole, 1: whole}


def test_which_points_of_the_stream_are_not_there_is_explained() -> None:
    several = why_missing({0: gemma3n()}, ["post_block", "attn_add"], 1)
    assert all("its residual is several streams" in why for why in several.values())
    (single,) = why_missing({0: Late()}, ["streams_pre"], 1).values()
    assert "one stream" in single


def test_a_configuration_that_is_refused_says_what_there_would_be() -> None:
    (refusal,) = find(Decoder(Conditional(), Conditional())).refusals
    assert refusal.startswith("Conditional: several streams (otherwise it has pre_attn")


def test_lists_of_other_lengths_are_not_the_decoder_s_stack() -> None:
    layers = find(Decoder(Strange(), Strange(), Strange()))
    assert layers == TappedLayers({}, ())


def test_lists_inside_of_layers_are_not_the_decoder_s_stack() -> None:
    layers = find(Decoder(Doubled(), Doubled()))
    assert layers.refusals == ()
    assert set(layers.points) == {0, 1}


def test_layers_of_other_pipeline_stages_are_passed_over() -> None:
    layers = find(Decoder(PPMissingLayer(), Late()))
    assert layers.refusals == ()
    assert layers.points == {1: POINTS}


def test_encoders_are_left_alone() -> None:
    model = Wrapper(Decoder(Late(), Late()), Decoder(Strange(), Late()))
    layers = find(model)
    assert layers.refusals == ()
    assert set(layers.points) == {0, 1}


def test_points_around_the_mlp_are_there_when_they_are_asked_for() -> None:
    model = Decoder(Woven(), Woven())
    assert find(model).points[0] == ["pre_attn", "post_block"]
    assert find(model, optional=MLP_POINTS).points[0][2:] == ["mlp_in", "mlp_out"]


def test_a_point_of_partial_sums_needs_a_single_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Decoder(Adding(), Adding())
    optional = ("mlp_out", "mlp_add")
    for ranks, points in ((1, [*optional]), (2, ["mlp_out"])):
        monkeypatch.setattr(
            tap, "get_tensor_model_parallel_world_size", lambda ranks=ranks: ranks
        )
        assert find(model, optional=optional).points[0] == points
