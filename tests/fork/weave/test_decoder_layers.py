# SPDX-License-Identifier: Apache-2.0
import pytest

from fork.weave.decoder_layers import WeaveResult, weave_classes, weave_module
from fork.weave.rules import Rule
from tests.fork.weave import _miniature as mini

MODULE = "vllm/model_executor/models/mini.py"


def woven(source: str) -> WeaveResult:
    result = weave_module(source, MODULE)
    assert result.problems == ()
    assert result.source is not None
    return result


def taps(source: str) -> list[str]:
    """The inserted calls, in the order of the text, without optional points."""
    before = {line.strip() for line in source.splitlines()}
    text = woven(source).source or ""
    lines = [line.strip() for line in text.splitlines()]
    return [
        line.removeprefix("@").replace("residual_tap.", "").replace("self, ", "")
        for line in lines
        if "residual_tap." in line and line not in before and "value(" not in line
        if not line.startswith("@")
    ]


def pair(point: str, hidden: str = "hidden_states", method: str = "pair") -> str:
    return f'{hidden}, residual = {method}("{point}", {hidden}, residual)'


def stream(point: str, name: str = "hidden_states") -> str:
    return f'{name} = stream("{point}", {name})'


@pytest.mark.parametrize("source", mini.ALL.values(), ids=mini.ALL)
def test_nothing_but_taps_is_put_in(source: str) -> None:
    text = woven(source).source
    assert text is not None
    rest = [line for line in text.splitlines() if "residual_tap" not in line]
    whole = [line for line in source.splitlines() if line in rest]
    assert rest == whole
    compile(text, MODULE, "exec")


def test_a_returned_expression_is_wrapped() -> None:
    text = woven(mini.RENAMED_BRANCH).source or ""
    assert 'return residual_tap.pair(self, "post_block", ' in text
    assert 'residual_tap.value(self, "mlp_out", self.mlp(hidden_states))' in text


def test_a_stale_residual_is_returned_beside_an_expression() -> None:
    source = mini.STALE.replace(
        "hidden_states = residual + hidden_states\n"
        "        return hidden_states, residual",
        "return residual + hidden_states, residual",
    )
    assert source != mini.STALE
    wrapped = 'residual_tap.stream(self, "post_block", residual + hidden_states)'
    assert f"return {wrapped}, residual" in (woven(source).source or "")


def test_an_input_of_the_mlp_without_a_name_is_tapped_in_its_place() -> None:
    text = woven(mini.TWO_NORMS).source or ""
    read = 'self.mlp(residual_tap.value(self, "mlp_in", self.ln_2(hidden_states)))'
    assert read in text


def test_a_branch_that_is_reduced_later_is_partial() -> None:
    assert pair("post_attn", "attn_out", "partial") in taps(mini.REDUCED_LATE)
    assert pair("post_attn", method="partial") in taps(mini.FUSED_REDUCE)


def test_the_points_are_recorded_on_the_class() -> None:
    text = woven(mini.PLAIN).source or ""
    record = '@residual_tap.tapped("pre_attn", "post_attn", "post_block", "mlp_in", '
    assert record + '"mlp_out", "attn_add", "mlp_add")\nclass MiniDecoderLayer' in text


def added(point: str, name: str) -> str:
    return f'residual_tap.value(self, "{point}", {name})'


@pytest.mark.parametrize(
    ("source", "attention", "mlp"),
    [
        (mini.FUSED, "hidden_states", "hidden_states"),
        (mini.SANDWICH, "hidden_states", "hidden_states"),
        (mini.PARALLEL, "attn_out", "mlp_out"),
        (mini.SCALED, *["hidden_states * self.multiplier"] * 2),
    ],
    ids=["fused", "norms behind", "parallel", "scaled"],
)
def test_what_a_branch_adds_is_tapped_where_it_is_added(
    source: str, attention: str, mlp: str
) -> None:
    text = woven(source).source or ""
    assert added("attn_add", attention) in text and added("mlp_add", mlp) in text
    in_order = ("attn_add", "post_attn", "mlp_add", "post_block")
    places = [text.index(f'(self, "{point}", ') for point in in_order]
    assert places == sorted(places)


def test_a_stream_that_is_more_than_a_sum_has_no_addition() -> None:
    before = "residual + hidden_states * self.multiplier\n"
    scaled = f"({before.strip()}) * self.scalar\n        return"
    source = scaled.join(mini.SCALED.rsplit(f"{before}        return", 1))
    assert source != mini.SCALED
    (layer,) = woven(source).layers
    assert "attn_add" in layer.points and "mlp_add" not in layer.points
    assert layer.lacks["mlp_add"] == "the stream is scaled behind what a MLP adds"


def test_an_addition_that_is_reduced_later_is_partial() -> None:
    (layer,) = woven(mini.REDUCED_LATE).layers
    assert layer.partial == ("mlp_out", "attn_add", "mlp_add")
    (layer,) = woven(mini.FUSED_REDUCE).layers
    assert layer.partial == ("attn_add",)


def test_the_import_comes_before_the_first_class() -> None:
    text = woven(mini.PLAIN + "import late\n").source or ""
    line = "from vllm.model_executor.layers.residual import tap as residual_tap"
    assert text.count(line) == 1
    assert text.index(line) < text.index("class ")


def test_a_layer_that_runs_anothers_forward_is_reported_and_left_alone() -> None:
    source = "from .llama import Base\n\n\nclass MyDecoderLayer(Base):\n    pass\n"
    result = weave_module(source, MODULE)
    assert result.source is None
    assert [layer.inherits for layer in result.layers] == ["Base"]


def test_a_module_without_decoder_layers_is_left_alone() -> None:
    assert weave_module("class Attention:\n    pass\n", MODULE) == WeaveResult()


LOOK_ALIKES = {
    "an unknown sublayer": (
        mini.PLAIN.replace("self.attn(", "self.gadget("),
        "cannot tell what kind of sublayer self.gadget is",
    ),
    "a norm of which nobody knows whether it adds": (
        mini.FUSED.replace("import RMSNorm", "import OtherNorm as RMSNorm"),
        "cannot tell whether self.norm_b adds the residual",
    ),
    "a residual that is added twice": (
        mini.STALE.replace(
            "residual + hidden_states\n        return",
            "residual + hidden_states\n"
            "        hidden_states = hidden_states + residual\n        return",
        ),
        "is added twice",
    ),
    "halves of the stream that are scaled apart": (
        mini.FUSED.replace(
            "hidden_states, residual = self.norm_a",
            "residual = residual * 2\n"
            "            hidden_states, residual = self.norm_a",
        ),
        "the parts of the stream are scaled apart before post_attn",
    ),
    "tokens that are split over ranks": (
        mini.PLAIN.replace("attn_output + residual", "reduce_scatter(attn_output)"),
        None,
    ),
    "a function that splits something over ranks": (
        mini.PLAIN.replace("attn_output + residual", "sp_fold(attn_output) + residual"),
        "cannot tell how sp_fold splits the tokens over ranks",
    ),
    "an mlp that reads half of a point": (
        mini.TWO_NORMS.replace(
            "mlp_out = self.mlp(self.ln_2(hidden_states))\n"
            "        hidden_states = mlp_out + attn_out + hidden_states\n"
            "        return hidden_states",
            "return self.mlp(self.ln_2(hidden_states)) + attn_out + hidden_states",
        ),
        "reads half of post_attn",
    ),
    "a loop over the stream": (
        mini.PLAIN.replace(
            "residual = hidden_states\n        hidden_states = self.ln_2",
            "for part in self.parts:\n"
            "            hidden_states = part(hidden_states)\n"
            "        hidden_states = self.ln_2",
        ),
        "a For statement over the stream",
    ),
    "an mlp before the attention": (
        mini.PLAIN.replace("self.attn(hidden_states=", "self.mlp(").replace(
            "self.mlp(hidden_states)\n        return",
            "self.attn(hidden_states)\n        return",
        ),
        None,
    ),
    "several streams": (
        mini.PLAIN.replace(
            "return residual + hidden_states",
            "return hidden_states, residual, residual",
        ),
        None,
    ),
}


@pytest.mark.parametrize(
    ("source", "why"), LOOK_ALIKES.values(), ids=LOOK_ALIKES.keys()
)
def test_a_layer_that_is_not_understood_stops_the_build(
    source: str, why: str | None
) -> None:
    result = weave_module(source, MODULE)
    assert result.source is None
    (problem,) = result.problems
    assert problem.startswith("MiniDecoderLayer: ")
    assert why is None or why in problem


def test_a_class_of_any_name_is_woven_when_it_is_named() -> None:
    source = mini.PLAIN.replace("MiniDecoderLayer", "Rung")
    assert weave_module(source, MODULE) == WeaveResult()
    result = weave_classes(source, {"Rung": Rule(reason="")})
    assert result.problems == ()
    assert "class Rung" in (result.source or "")
    assert 'stream(self, "post_attn", hidden_states)' in (result.source or "")
