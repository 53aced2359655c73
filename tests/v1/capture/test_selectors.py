# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.v1.capture._strategies import HOOKS, context, positions
from vllm.v1.capture.errors import CaptureValidationError, fail
from vllm.v1.capture.selectors import parse_spec
from vllm.v1.capture.types import (
    CaptureSpec,
    captured_prompt_positions,
    min_captured_prompt_position,
    spec_touches_prompt,
)
from vllm.v1.residual.selectors import resolve_positions
from vllm.v1.residual.spans import LAST_ROW, OPEN_END

WHERE = "capture.test"


def parse(raw: Any) -> Any:
    return parse_spec(raw, context(), WHERE)


def layers(selector: Any) -> list[int]:
    return parse({"hooks": {"post_block": selector}}).hooks["post_block"]


@pytest.mark.parametrize(
    "selector, selected",
    [
        ("all", [0, 1, 2, 3]),
        ([2, 0, 2], [0, 2]),
        ({"layers": [3]}, [3]),
        ({"ranges": [[1, 2]]}, [1, 2]),
        ({"layers": [3], "ranges": [[0, 0], [2, 3]]}, [0, 2, 3]),
        ((1,), [1]),
        (range(1, 3), [1, 2]),
        (np.array([1, 3]), [1, 3]),
        (2, [2]),
        ("2", [2]),
        ("0, 2-3", [0, 2, 3]),
        (["1", "2-3"], [1, 2, 3]),
    ],
)
def test_a_layer_selector_stands_for_sorted_layers(
    selector: Any, selected: list[int]
) -> None:
    assert layers(selector) == selected


@pytest.mark.parametrize(
    "selector, ranges",
    [
        ("last_prompt", ((4, 5),)),
        ("all_prompt", ((0, 5),)),
        ("all_generated", ((5, OPEN_END),)),
        ("all", ((0, OPEN_END),)),
        ("last_generated", ((5, LAST_ROW),)),
        ([0, 1, 4, 7], ((0, 2), (4, 5), (7, 8))),
        ([-1, 0, -3, 6], ((0, 1), (2, 3), (4, 5), (6, 7))),
        ({"last": 2}, ((3, 5),)),
        ({"last": 9}, ((0, 5),)),
        ({"ranges": [[1, 2], [-1, -1], [4, 6]]}, ((1, 3), (4, 7))),
        (np.arange(2), ((0, 2),)),
        ({"ranges": np.array([[1, 2], [4, 6]])}, ((1, 3), (4, 7))),
    ],
)
def test_a_position_selector_follows_the_rule_of_rows(
    selector: Any, ranges: Any
) -> None:
    assert resolve_positions(selector, context(), WHERE, fail) == ranges
    in_prompt = [p for first, stop in ranges for p in range(first, min(stop, 5))]
    spec = CaptureSpec({}, selector)
    assert captured_prompt_positions(spec, 5) == in_prompt
    assert min_captured_prompt_position(spec, 5) == min(in_prompt, default=None)
    assert spec_touches_prompt(spec, 5) == bool(in_prompt)


@pytest.mark.parametrize("name", ["resid_post", "hook_resid_post", "post_block"])
@pytest.mark.parametrize("form", ["hook", "list", "key"])
def test_hook_points_have_the_names_of_other_systems(name: str, form: str) -> None:
    address = f"blocks.2.{name}" if name.startswith("hook") else f"{name}.2"
    forms: dict[str, Any] = {
        "hook": {name: [2]}, "list": [address], "key": {address: None}
    }  # fmt: skip
    assert parse({"hooks": forms[form]}).hooks == {"post_block": [2]}


def test_addresses_and_names_of_one_point_join() -> None:
    hooks = {"post_block.3": None, "resid_post": [0], "post_block": [0, 1]}
    assert parse({"hooks": hooks}).hooks == {"post_block": [0, 1, 3]}


def test_positions_default_to_the_last_token_of_the_prompt() -> None:
    assert parse({"hooks": {"pre_attn": [0]}}).positions == "last_prompt"


def test_a_dataclass_will_do_as_well_as_an_object() -> None:
    @dataclass
    class Spec:
        hooks: dict[str, Any]
        positions: Any = "all"

    assert parse(Spec({"pre_attn": (0,)})).hooks == {"pre_attn": [0]}


BAD = [
    # (the invalid value, the parameter, the value as shown, part of the remedy)
    ("text", WHERE, "'text'", "must be an object"),
    ({}, f"{WHERE}.hooks", "None", "at least one hook point"),
    ({"hooks": {}}, f"{WHERE}.hooks", "{}", '{"post_block": [0]}'),
    ({"hooks": [1]}, f"{WHERE}.hooks", "1", "addresses"),
    ({"hooks": ["post_block"]}, f"{WHERE}.hooks.post_block", "None", "no layers"),
    (
        {"hooks": {"post_block.1": [1]}},
        f"{WHERE}.hooks.post_block.1",
        "[1]",
        "its layer",
    ),
    (
        {"hook": {}},
        f"{WHERE}.hook",
        "{}",
        "its keys are ['heads', 'hooks', 'positions']",
    ),
    ({"hooks": {"pre": [0]}}, f"{WHERE}.hooks", "'pre'", "the hook points are"),
    ({"hooks": {"mlp_in": [0]}}, f"{WHERE}.hooks", "'mlp_in'", "this model has no"),
    ({"hooks": {3: [0]}}, f"{WHERE}.hooks", "3", "the hook points are"),
]
BAD_LAYERS = [
    (4, "4", "layers 0 to 3"),
    ([4], "4", "layers 0 to 3"),
    ([-1], "-1", "layers 0 to 3"),
    ([True], "True", "a layer must be an integer"),
    ([1.0], "1.0", "a layer must be an integer"),
    (["1.5"], "'1.5'", "0-based index"),
    ("3-2", "'3-2'", "first <= last"),
    ("7", "7", "layers 0 to 3"),
    ([], "[]", "selects no layer"),
    ("some", "'some'", '"all"'),
    ({}, "{}", '"all"'),
    ({"layer": [1]}, "{'layer': [1]}", "layers"),
    ({"layers": 1}, "1", "must be a list"),
    ({"ranges": [1]}, "1", "pairs [first, last]"),
    ({"ranges": [[1]]}, "[1]", "pairs [first, last]"),
    ({"ranges": [[2, 1]]}, "[2, 1]", "first <= last"),
    ({"ranges": [[2, 9]]}, "9", "layers 0 to 3"),
]
BAD_POSITIONS = [
    ("first_prompt", "'first_prompt'", "'last_prompt'"),
    ([], "[]", "not empty"),
    (3, "3", "a list of token positions"),
    (None, "None", "'all_generated'"),
    ([True], "True", "a position must be an integer"),
    ([1.5], "1.5", "a position must be an integer"),
    ([-6], "-6", "the prompt has 5 tokens"),
    ({"last": 0}, "{'last': 0}", "k from 1"),
    ([8], "8", "raise max_tokens"),
    ([10**30], "1000", "within 2**31"),
]


def refusal(raw: Any) -> CaptureValidationError:
    with pytest.raises(CaptureValidationError) as caught:
        parse(raw)
    return caught.value


@pytest.mark.parametrize("raw, parameter, value, remedy", BAD)
def test_a_bad_spec_is_refused(
    raw: Any, parameter: str, value: str, remedy: str
) -> None:
    error = refusal(raw)
    assert error.parameter == parameter
    assert value in str(error.value)
    assert remedy in str(error)


@pytest.mark.parametrize("selector, value, remedy", BAD_LAYERS)
def test_a_bad_layer_selector_is_refused(
    selector: Any, value: str, remedy: str
) -> None:
    error = refusal({"hooks": {"post_block": selector}})
    assert str(error.parameter).startswith(f"{WHERE}.hooks.post_block")
    assert value in str(error.value)
    assert remedy in str(error)


@pytest.mark.parametrize("selector, value, remedy", BAD_POSITIONS)
def test_a_bad_position_selector_is_refused(
    selector: Any, value: str, remedy: str
) -> None:
    error = refusal({"hooks": {"post_block": [0]}, "positions": selector})
    assert error.parameter == f"{WHERE}.positions"
    assert value in str(error.value)
    assert remedy in str(error)


def test_a_layer_without_the_hook_point_is_refused() -> None:
    ctx = context()
    ctx.hook_points = {0: HOOKS, 1: ("post_block",), 2: HOOKS, 3: HOOKS}
    with pytest.raises(CaptureValidationError, match="these have it: \\[0, 2, 3\\]"):
        parse_spec({"hooks": {"post_attn": [1]}}, ctx, WHERE)
    spec = parse_spec({"hooks": {"post_attn": "all"}}, ctx, WHERE)
    assert spec.hooks == {"post_attn": [0, 2, 3]}


def test_a_long_value_is_shortened() -> None:
    error = refusal({"hooks": "x" * 10_000})
    assert len(str(error.value)) < 200
    assert len(str(error)) < 1000


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["all", "last_prompt", "layers", "ranges", *HOOKS])
)
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["hooks", "positions", "layers", "ranges", *HOOKS])
            | st.text(max_size=3)
            | st.integers(),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@given(
    anything
    | st.fixed_dictionaries({"hooks": anything}, optional={"positions": anything})
    | st.fixed_dictionaries(
        {"hooks": st.dictionaries(st.sampled_from(HOOKS), anything, min_size=1)},
        optional={"positions": anything},
    )
)
def test_whatever_a_user_writes_is_a_spec_or_a_refusal(raw: Any) -> None:
    ctx = context()
    try:
        spec = parse_spec(raw, ctx, WHERE)
    except CaptureValidationError as error:
        assert error.parameter
        assert str(error)
        return
    for hook, selected in spec.hooks.items():
        assert hook in HOOKS
        assert selected == sorted(set(selected)) != []
        assert set(selected) <= set(range(4))
    ranges = resolve_positions(spec.positions, ctx, WHERE, fail)
    assert ranges[-1][1] >= OPEN_END or positions(ranges, 8)


def test_what_the_mlp_adds_is_captured_only_where_it_is_a_hook_point() -> None:
    points = {0: ("post_block", "mlp_add"), 1: ("post_block", "mlp_out")}
    ctx = replace(context(), hook_points=points, num_hidden_layers=2)
    raw = {"hooks": ["blocks.0.hook_mlp_out"], "positions": "all_prompt"}
    assert parse_spec(raw, ctx, WHERE).hooks == {"mlp_add": [0]}
    ctx = replace(ctx, hook_points={0: points[1], 1: points[1]})
    with pytest.raises(CaptureValidationError, match="--hook-points mlp_add"):
        parse_spec(raw, ctx, WHERE)
