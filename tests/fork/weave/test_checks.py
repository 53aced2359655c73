# SPDX-License-Identifier: Apache-2.0
"""The checks on toy numbers fail if a hook point is in the wrong place."""

import libcst as cst
import pytest

from fork.weave.decoder_layers import weave_module
from fork.weave.layer_class import Module
from fork.weave.rules import Rule
from tests.fork.weave import _miniature as mini
from tests.fork.weave._checks import check, subjects

POST = 'hidden_states = residual_tap.stream(self, "post_attn", hidden_states)'


def run_checks(text: str) -> None:
    cls = Module(cst.parse_module(text)).classes["MiniDecoderLayer"]
    for subject in subjects(text, cls, Rule(reason="")):
        check(subject)


def scaled() -> str:
    return weave_module(mini.STALE, "vllm/mini.py").source or ""


WRONG = {
    "the branch alone": lambda s: move(s, "hidden_states = residual + hidden_states"),
    "after the residual was set": lambda s: move(s, "hidden_states = self.ln_2("),
    "one point later": lambda s: s.replace('"post_attn"', '"post_block"', 2),
    "the stale residual added": lambda s: s.replace(
        'hidden_states = residual_tap.stream(self, "post_block", hidden_states)',
        'hidden_states, residual = residual_tap.pair(self, "post_block", '
        "hidden_states, residual)",
    ),
}


def move(text: str, before: str) -> str:
    """The tap after the attention, moved to before the first `before`."""
    text = text.replace(f"        {POST}\n", "", 1)
    return text.replace(before, f"{POST}\n        {before}", 1)


def test_the_right_places_pass() -> None:
    run_checks(scaled())


@pytest.mark.parametrize("spoil", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_place_fails(spoil) -> None:
    spoilt = spoil(scaled())
    assert spoilt != scaled()
    with pytest.raises((AssertionError, KeyError)):
        run_checks(spoilt)
