# SPDX-License-Identifier: Apache-2.0
"""Layers whose tokens are split over tensor-parallel ranks."""

from dataclasses import replace

import pytest

from fork.weave.decoder_layers import weave_module
from fork.weave.rules import Anchor, Rule
from tests.fork.weave import _miniature as mini
from tests.fork.weave.test_rules import KEY, MODULE, weave_with

POINTS = ("pre_attn", "post_attn", "post_block", "mlp_in", "mlp_out")

SHARES = mini.layer(
    """
    def forward(self, positions, hidden_states, residual):
        num_tokens = positions.shape[0]
        if residual is None:
            residual = hidden_states
            hidden_states = self.norm_a(hidden_states)
        else:
            hidden_states, residual = self.norm_a(hidden_states, residual)
        if self.shares:
            hidden_states = sp_all_gather(hidden_states)[:num_tokens]
        hidden_states = self.attn(positions, hidden_states)
        if self.shares:
            hidden_states = sp_reduce_scatter(hidden_states)
        hidden_states, residual = self.norm_b(hidden_states, residual)
        hidden_states = self.mlp(hidden_states)
        return hidden_states, residual
    """
)
"""A module that takes a rank's share, and returns one if `shares`."""

RULE = Rule(
    reason="shares",
    cases=({"self.shares": False}, {"self.shares": True}),
    split=dict.fromkeys(POINTS, "self.shares"),
)

BEGINS = mini.layer(
    """
    def forward(self, positions, hidden_states, residual):
        given_share = (
            self.shares
            and residual is not None
            and hidden_states.shape[0] != positions.shape[0]
        )
        if residual is None:
            residual = hidden_states
            hidden_states = self.norm_a(hidden_states)
        else:
            hidden_states, residual = self.norm_a(hidden_states, residual)
        if given_share:
            hidden_states = tensor_model_parallel_all_gather(hidden_states, 0)
        hidden_states = self.attn(positions, hidden_states)
        if self.shares:
            hidden_states = tensor_model_parallel_reduce_scatter(hidden_states, dim=0)
            if not given_share:
                residual = sequence_parallel_chunk(residual)
        hidden_states, residual = self.norm_b(hidden_states, residual)
        hidden_states = self.mlp(hidden_states)
        return hidden_states, residual
    """
)
"""A module that takes all tokens or a share, and returns a share if `shares`."""

BEGINS_RULE = Rule(
    reason="shares",
    cases=tuple(
        {"self.shares": shares, "given_share": given}
        for shares, given in ((False, False), (True, False), (True, True))
    ),
    split=dict.fromkeys(POINTS, "self.shares") | {"pre_attn": "given_share"},
    anchors=(
        Anchor(
            point="pre_attn",
            method="pair",
            arguments=("hidden_states", "residual"),
            statement="given_share = (",
            after=True,
        ),
    ),
)


def test_statements_may_follow_the_last_point(monkeypatch: pytest.MonkeyPatch) -> None:
    call = "residual_tap.lone_token(self, num_tokens, hidden_states, residual)"
    statement = f"if self.shares:\n    hidden_states, residual = {call}"
    rule = replace(RULE, last=(statement,))
    result = weave_with(monkeypatch, SHARES, {KEY: rule})
    assert result.problems == ()
    before, _, behind = (result.source or "").partition(f"residual = {call}\n")
    assert '"post_block"' in before.splitlines()[-3]
    assert behind.strip() == "return hidden_states, residual"


def without(point: str) -> Rule:
    """The rule of a layer without one point."""
    kept = {name: text for name, text in RULE.split.items() if name != point}
    return replace(RULE, split=kept)


WRONG = {
    "no rule": (SHARES, Rule(reason="none"), ""),
    "an entry that the rule takes for whole": (
        SHARES,
        without("pre_attn"),
        "are not split over ranks",
    ),
    "a point that the rule takes for whole": (
        SHARES,
        without("post_attn"),
        "post_attn holds a rank's share of the tokens, but its call is pair",
    ),
    "a point that the rule takes for a share": (
        SHARES.replace("if self.shares:", "if False:"),
        replace(RULE, cases=({"self.shares": True, "False": False},)),
        "self.attn is given a rank's share of the tokens",
    ),
    "an attention over a share": (
        SHARES.replace(
            "hidden_states = sp_all_gather(hidden_states)[:num_tokens]", "pass"
        ),
        RULE,
        "self.attn is given a rank's share of the tokens",
    ),
    "a share that is added to all tokens": (
        SHARES.replace("hidden_states = sp_reduce_scatter(hidden_states)", "pass"),
        RULE,
        "a rank's share of the tokens meets a tensor of all tokens",
    ),
    "another dimension that is gathered": (
        BEGINS.replace("all_gather(hidden_states, 0)", "all_gather(hidden_states, 1)"),
        BEGINS_RULE,
        "splits something else than tokens",
    ),
    "a share that is split again": (
        BEGINS.replace("if not given_share:", "if True:"),
        replace(
            BEGINS_RULE,
            cases=tuple({**case, "True": True} for case in BEGINS_RULE.cases),
        ),
        "are split over ranks already",
    ),
}


@pytest.mark.parametrize(("source", "rule", "why"), WRONG.values(), ids=WRONG)
def test_what_the_analysis_cannot_follow_stops_the_build(
    monkeypatch: pytest.MonkeyPatch, source: str, rule: Rule, why: str
) -> None:
    result = weave_with(monkeypatch, source, {KEY: rule})
    assert result.source is None
    (problem,) = result.problems
    assert why in problem


def test_without_shares_the_calls_are_as_ever() -> None:
    source = SHARES.replace("if self.shares:", "if False:")
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        whole = replace(RULE, cases=({"False": False},), split={})
        result = weave_with(patch, source, {KEY: whole})
    assert "split_" not in (result.source or "split_")
    assert weave_module(mini.FUSED, MODULE).problems == ()
