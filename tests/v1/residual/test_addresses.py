# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.residual.tap import (
    ALIASES,
    did_you_mean,
    hook_name,
    parse_address,
    resolve_tap,
    why_not,
)


@pytest.mark.parametrize(
    ("address", "tap"),
    [
        ("resid_post.10", (10, "post_block")),
        ("blocks.10.hook_resid_post", (10, "post_block")),
        ("blocks.0.hook_in", (0, "pre_attn")),
        ("blocks.3.ln2.hook_in", (3, "post_attn")),
        ("blocks.7.hook_out", (7, "post_block")),
        ("mlp_out.2", (2, "mlp_out")),
        ("blocks.2.mlp.hook_out", (2, "mlp_out")),
        ("blocks.2.hook_mlp_out", (2, "mlp_add")),
        ("post_attn.1", (1, "post_attn")),
        ("post_block", None),
        ("blocks.01.hook_out", None),
        ("blocks.1.hook_mlp_in", None),
        ("blocks.1.hook_z", (1, "z")),
        ("blocks.1.attn.hook_q", (1, "q")),
        ("blocks.1.hook_pattern", None),
        ("resid_post.-1", None),
        ("resid_post.1.2", None),
    ],
)
def test_addresses(address: str, tap: tuple[int, str] | None) -> None:
    assert parse_address(address) == tap


@pytest.mark.parametrize(
    ("layer", "hook", "tap"),
    [
        (3, "resid_post", (3, "post_block")),
        (None, "resid_mid", (None, "post_attn")),
        (None, "resid_post.3", (3, "post_block")),
        (3, "blocks.3.hook_resid_post", (3, "post_block")),
        (2, "resid_post.3", None),
        (2, "nowhere", None),
    ],
)
def test_a_hook_with_a_layer_beside_it(layer, hook, tap) -> None:
    assert resolve_tap(layer, hook) == tap


@given(st.text())
def test_any_text_is_an_address_or_none(text: str) -> None:
    tap = parse_address(text)
    assert tap is None or (tap[0] >= 0 and hook_name(tap[1]) == tap[1])


def test_no_name_has_two_meanings() -> None:
    assert not set(ALIASES) & set(ALIASES.values())


def test_a_point_that_was_not_enabled_has_its_option_in_the_message() -> None:
    assert "--hook-points mlp_add" in why_not("mlp_add")
    assert why_not("post_block") == ""


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("model.layers.3.mlp", "mlp_out.3"),
        ("model.layers.11", "post_block.11"),
        ("transformer.h.0.ln_2", "post_attn.0"),
        ("layers.2.input_layernorm", "pre_attn.2"),
        ("post_blok", "post_block"),
        ("hook_resid_pst", "hook_resid_post"),
        ("model.layers.3.rotary", None),
        ("lm_head", None),
        (7, None),
    ],
)
def test_names_of_other_systems_are_guessed(name: object, meant: str | None) -> None:
    said = did_you_mean(name)
    assert said == ("" if meant is None else f". Did you mean {meant!r}?")
