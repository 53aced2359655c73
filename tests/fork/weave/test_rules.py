# SPDX-License-Identifier: Apache-2.0
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from fork.weave import decoder_layers, rules
from fork.weave.decoder_layers import Layer, WeaveResult, weave_module
from fork.weave.rules import Anchor, Rule, Sometimes
from tests.fork.weave import _miniature as mini

MODULE = "vllm/model_executor/models/mini.py"
KEY = "model_executor/models/mini:MiniDecoderLayer"


def weave_with(
    monkeypatch: pytest.MonkeyPatch, source: str, ruled: Mapping[str, Rule]
) -> WeaveResult:
    monkeypatch.setattr(decoder_layers, "RULES", ruled)
    return weave_module(source, MODULE)


def with_properties(result: WeaveResult) -> Any:
    """An object with the properties that were woven into the class."""
    text = result.source or ""
    names: dict[str, Any] = {}
    exec("class Mini:\n" + text[text.index("    @property") :], names)
    return names["Mini"]()


SPLIT = mini.layer(
    """
    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = self.ln_1(hidden_states)
        hidden_states = self.attn(hidden_states)
        if self.split:
            hidden_states = reduce_scatter(hidden_states)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.ln_2(hidden_states)
        hidden_states = self.mlp(hidden_states)
        return residual + hidden_states
    """
)


def test_a_case_leaves_paths_out_and_the_layer_says_when_it_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rule = Rule(
        reason="split", cases=({"self.split": False},), unless={"self.split": "a split"}
    )
    result = weave_with(monkeypatch, SPLIT, {KEY: rule})
    assert result.layers[0].unless == ("a split",)
    made = with_properties(result)
    for split, expected in ((False, ()), (True, ("a split",))):
        made.split = split
        assert made.hook_points_unless == expected


HALVED = mini.layer(
    """
    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = self.attn(self.ln_1(hidden_states))
        if self.half:
            hidden_states *= 0.5
            residual *= 0.5
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.mlp(self.ln_2(hidden_states))
        return residual + hidden_states
    """
)


def test_a_point_of_some_layers_is_proven_for_these(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = Sometimes(
        points=("attn_add",),
        cases={"self.half": False},
        lacking="self.half",
        why="half",
    )
    (layer,) = weave_module(HALVED, MODULE).layers
    assert "attn_add" not in layer.points
    rule = Rule(reason="scales", sometimes=(few,))
    monkeypatch.setattr(decoder_layers, "RULES", {KEY: rule})
    result = weave_module(HALVED, MODULE)
    (layer,) = result.layers
    assert "attn_add" in layer.points and layer.sometimes == {"attn_add": "half"}
    made = with_properties(result)
    for half, expected in ((False, {}), (True, {"attn_add": "half"})):
        made.half = half
        assert made.hook_points_lacking == expected


IN_ONE_SUM = mini.layer(
    """
    def forward(self, hidden_states):
        residual = hidden_states
        normed = self.ln_1(hidden_states)
        attention = self.attn(normed)
        output = self.mlp(normed)
        output += attention
        output = tensor_model_parallel_all_reduce(output)
        return output + residual
    """
)


def test_what_an_mlp_returns_before_a_sum_over_ranks_is_a_point_of_one_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (layer,) = weave_with(monkeypatch, IN_ONE_SUM, {KEY: Rule(reason="")}).layers
    assert "mlp_out" in layer.points and "mlp_in" in layer.points
    assert set(layer.partial) == {"mlp_out", "attn_add", "mlp_add"}
    behind = "output = self.mlp("
    by_hand = tuple(
        Anchor(
            point=p, method="value", arguments=("output",), statement=behind, after=True
        )
        for p in ("mlp_out", "mlp_add")
    )
    before = Anchor(
        point="mlp_in", method="value", arguments=("normed",), statement=behind
    )
    rule = Rule(reason="by hand", anchors=(before, *by_hand))
    (layer,) = weave_with(monkeypatch, IN_ONE_SUM, {KEY: rule}).layers
    assert set(layer.partial) == {"mlp_out", "attn_add", "mlp_add"}


def test_an_anchor_must_begin_exactly_one_statement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for statement, count in (("nothing", 0), ("residual = hidden_states", 2)):
        anchor = Anchor(
            point="post_attn",
            method="stream",
            arguments=("hidden_states",),
            statement=statement,
        )
        rule = Rule(reason="by hand", anchors=(anchor,))
        (problem,) = weave_with(monkeypatch, mini.PLAIN, {KEY: rule}).problems
        assert f"begins {count} statements" in problem


def test_an_anchor_in_the_wrong_place_stops_the_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    anchor = Anchor(
        point="post_attn",
        method="stream",
        arguments=("attn_output",),
        statement="attn_output = self.attn(",
        after=True,
    )
    rule = Rule(reason="by hand", anchors=(anchor,))
    (problem,) = weave_with(monkeypatch, mini.PLAIN, {KEY: rule}).problems
    assert "post_attn misses a part of the stream" in problem


def test_a_rule_for_a_class_that_is_gone_stops_the_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decoder_layers, "RULES", {KEY: Rule(reason="old")})
    (problem,) = weave_module("class Other:\n    pass\n", MODULE).problems
    assert problem.startswith("MiniDecoderLayer: ")


def test_a_refused_layer_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_layers, "REFUSED", {KEY: "several streams"})
    result = weave_module(mini.PLAIN, MODULE)
    assert result.source is None
    assert result.refused == (
        Layer(name="MiniDecoderLayer", refused="several streams"),
    )


def test_a_layer_that_runs_several_times_says_at_each_call_which_run_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rule = Rule(reason="each run", run="step", runs="enumerate(self.attn.parts)")
    source = mini.PLAIN.replace("(self, hidden_states)", "(self, hidden_states, step)")
    result = weave_with(monkeypatch, source, {KEY: rule})
    assert result.problems == ()
    text = result.source or ""
    calls = [line for line in text.splitlines() if "residual_tap." in line]
    calls = [line for line in calls if "tapped" not in line]
    assert len(calls) == 7  # Five of the stream, two of what the branches add.
    assert all("run=step)" in line for line in calls)
    assert "attention in enumerate(self.attn.parts)}" in text


def test_every_rule_and_refusal_gives_a_reason() -> None:
    for rule in rules.RULES.values():
        assert len(rule.reason.split()) > 3
    for table in (rules.REFUSED, rules.NOT_TAPPED, rules.MODELS, rules.LOOPS):
        assert all(len(reason.split()) > 3 for reason in table.values())
    tables = [*rules.RULES, *rules.REFUSED, *rules.NOT_TAPPED]
    assert len(tables) == len(set(tables))


STREAMS = """
    def forward(self, hidden_states, residual=None):
        if self.fused:
            return self.in_one_kernel(hidden_states)
        return self.apart(hidden_states, residual)

    def apart(self, hidden_states, residual):
        mixed = hidden_states.mean(0)
        mixed = mixed + self.attn(self.norm_a(mixed))
        out = self.mlp(self.norm_b(mixed))
        hidden_states = self.spread({spread}, out)
        return {returned}, None
    """


def several(source: str, monkeypatch: pytest.MonkeyPatch) -> WeaveResult:
    """Weave `STREAMS` by a rule with both points."""
    entering = Anchor(
        point="streams_pre",
        method="streams",
        arguments=("hidden_states",),
        statement="mixed = hidden_states.mean",
        within="apart",
    )
    leaving = Anchor(
        point="streams_post",
        method="streams_first",
        arguments=("hidden_states",),
        statement="return ",
        within="apart",
    )
    rule = Rule(
        reason="streams",
        streams="self.count",
        points=("streams_pre", "streams_post"),
        cases=({"self.fused": False},),
        unless={"self.fused": "one kernel"},
        inline=("apart",),
        anchors=(entering, leaving),
    )
    monkeypatch.setattr(decoder_layers, "RULES", {KEY: rule})
    return weave_module(mini.layer(source), MODULE)


def test_a_layer_of_several_streams_has_points_of_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = STREAMS.format(spread="hidden_states", returned="hidden_states")
    result = several(given, monkeypatch)
    assert result.problems == ()
    (layer,) = result.layers
    assert layer.points == ("streams_pre", "streams_post", "mlp_in", "mlp_out")
    assert set(layer.lacks) == {"attn_add", "mlp_add"}
    assert layer.unless == ("one kernel",)
    text = result.source or ""
    assert 'residual_tap.streams(self, "streams_pre", hidden_states)' in text
    assert 'residual_tap.streams_first(self, "streams_post", hidden_states)' in text
    assert "return self.count" in text


@pytest.mark.parametrize(
    ("spread", "returned", "problem"),
    [
        ("hidden_states", "out", "streams_post is not what the layer returns"),
        ("residual", "hidden_states", "streams_post is computed around streams_pre"),
    ],
)
def test_streams_that_go_around_a_point_stop_the_build(
    monkeypatch: pytest.MonkeyPatch, spread: str, returned: str, problem: str
) -> None:
    given = STREAMS.format(spread=spread, returned=returned)
    (found,) = several(given, monkeypatch).problems
    assert problem in found


def test_an_anchor_in_a_method_that_is_gone_stops_the_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = STREAMS.format(spread="hidden_states", returned="hidden_states")
    renamed = given.replace("apart", "elsewhere")
    (found,) = several(renamed, monkeypatch).problems
    assert "the rule's anchor is in apart, which is not there" in found


BOTH = (
    STREAMS.format(spread="hidden_states", returned="hidden_states")
    .replace("if self.fused:", "if not self.several:")
    .replace("self.in_one_kernel(hidden_states)", "self.plain(hidden_states)")
    + """
    def plain(self, hidden_states):
        hidden_states = hidden_states + self.attn(self.norm_a(hidden_states))
        hidden_states = hidden_states + self.mlp(self.norm_b(hidden_states))
        return hidden_states, None
    """
)


def test_a_layer_may_have_one_stream_or_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    several(BOTH, monkeypatch)
    other = replace(
        decoder_layers.RULES[KEY], cases=({"self.several": True},), unless={}
    )
    rule = Rule(
        reason="either",
        cases=({"self.several": False},),
        inline=("plain",),
        otherwise=("self.several", other),
    )
    monkeypatch.setattr(decoder_layers, "RULES", {KEY: rule})
    result = weave_module(mini.layer(BOTH), MODULE)
    assert result.problems == ()
    (layer,) = result.layers
    streams = {"streams_pre", "streams_post"}
    single = {"pre_attn", "post_attn", "post_block", "attn_add", "mlp_add"}
    assert {*layer.points} == {*streams, *single, "mlp_in", "mlp_out"}
    made = with_properties(result)
    made.count = 4
    for has_several, count, lacking in ((False, 0, streams), (True, 4, single)):
        made.several = has_several
        assert made.hook_points_streams == count
        assert made.hook_points_lacking.keys() == lacking
