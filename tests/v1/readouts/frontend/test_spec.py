# SPDX-License-Identifier: Apache-2.0
"""Any value at a key of a readout is parsed, or refused with a short message."""

from dataclasses import replace
from typing import Any

import pytest

from vllm.v1.capture.types import CaptureContext, VllmInternalRequestId
from vllm.v1.readouts.errors import ReadoutValidationError
from vllm.v1.readouts.frontend.admission import MAX_NUMBERS, check_size
from vllm.v1.readouts.frontend.entry import Server
from vllm.v1.readouts.frontend.rules import parse_stops
from vllm.v1.readouts.frontend.spec import parse_readout
from vllm.v1.residual.module_info import ModuleInfo
from vllm.v1.residual.readout_plan import Readout, Refusals, RowPart
from vllm.v1.steering.spec.table import as_array

CONTEXT = CaptureContext(
    VllmInternalRequestId("r"),
    num_prompt_tokens=3,
    num_computed_tokens=0,
    num_hidden_layers=3,
    hidden_size=4,
    element_size_bytes=4,
    tensor_parallel_size=1,
    pipeline_parallel_size=1,
    max_tokens=8,
    hook_points=dict.fromkeys(range(3), ("pre_attn", "post_attn", "post_block")),
)
SERVER = Server({}, vocab_size=1280, max_top_k=64, parse_array=as_array)
RIGHT: dict[str, dict[str, Any]] = {
    "probe": {"vectors": [[0.25] * 4], "bias": [0.5], "layer": 1, "hook": "post_block"},
    "lens": {"layers": [1], "top_k": 3, "tokens": [5]},
    "norm": {"hooks": {"post_block": [0]}},
    "rows": {"hooks": {"post_block": [0]}, "reduce": "mean"},
    "sae": {"sae": "x"},
    "custom": {"name": "x"},
    "attention": {"layers": [1]},
    "attribution": {"layers": [1], "tokens": [5]},
}
KEYS = (
    *("kind", "hook", "hooks", "layer", "layers", "positions", "reduce", "vectors"),
    *("bias", "activation", "cosine", "threshold", "top_k", "tokens", "translator"),
    *("probe", "sae", "features", "name", "fn", "unknown", "heads", "keys", "full"),
)
OTHERS: tuple[Any, ...] = (
    *(None, True, 0, -1, 0.5, 2**31, 10**40, 1e308, float("nan"), "", "x", "all"),
    *("\x00", "é" * 300, "x" * 5000, [], {}, [[]], [{}], [None], ["x" * 5000]),
    *({"a": 1}, {"ranges": [[0, 1]]}, {"1": 1}, [10**40]),
)


def parsed(kind: str, key: str, value: Any) -> Readout | None:
    try:
        return parse_readout(
            "n", {"kind": kind, **RIGHT[kind], key: value}, CONTEXT, SERVER
        )
    except ReadoutValidationError as error:
        assert len(str(error)) < 3000
        return None


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("kind", RIGHT)
def test_whatever_a_key_says_is_read_or_refused(kind: str) -> None:
    for key in KEYS:
        for value in OTHERS:
            parsed(kind, key, value)


NAMED = ModuleInfo(name="d", kind="probe", path="", width=4, size=1)
IGNORED: tuple[tuple[str, dict[str, Any]], ...] = (
    *(("layer", {"layer": layer}) for layer in ("all", "0-1", "0,2")),
    *(("layer", {"layer": layer}) for layer in (9, -1, True, None, [1, 2])),
    *(("hook", {"hook": hook}) for hook in ("mlp_in", "middle", 3)),
    *(
        ("vectors", {"vectors": [row]})
        for row in (["1"] * 4, [True] * 4, [True, 1.0, 1.0, 1.0])
    ),
    *(("bias", {"bias": bias}) for bias in (1e300, [10**40])),
    ("threshold", {"activation": "jumprelu", "threshold": 1e300}),
    ("vectors", {"probe": "d"}),
    ("bias", {"probe": {"vectors": [[1.0] * 4]}, "vectors": None, "bias": 2.0}),
)


@pytest.mark.parametrize(("key", "more"), IGNORED)
def test_nothing_that_a_probe_says_is_ignored(key: str, more: dict[str, Any]) -> None:
    server = Server({"d": NAMED}, vocab_size=1280, max_top_k=64, parse_array=as_array)
    spec = {"kind": "probe", **RIGHT["probe"], **more}
    if spec["vectors"] is None:
        del spec["vectors"]
    with pytest.raises(ReadoutValidationError) as caught:
        parse_readout("n", spec, CONTEXT, server)
    assert caught.value.parameter == f"readouts.n.{key}"


@pytest.mark.parametrize("key", ["readout", "index", "above", "below", "unknown"])
def test_whatever_a_stop_condition_says_is_read_or_refused(key: str) -> None:
    readout = parsed("probe", "positions", "all_generated")
    assert readout is not None
    for value in OTHERS:
        rule = {"readout": "n", "index": 0, "above": 1, key: value}
        try:
            parse_stops([rule], [readout], CONTEXT, {})
        except ReadoutValidationError as error:
            assert len(str(error)) < 3000


TOP_K = ModuleInfo(name="k", kind="sae", path="", width=4, size=9, active=4)
RULES: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
    ({"sae": "free"}, {}, "name the feature"),
    ({"sae": "free"}, {"index": 5}, "give the readout"),
    ({"sae": "k", "top_k": 3}, {"index": 5}, "give the readout"),
    ({"sae": "k", "top_k": 3}, {"index": 9}, "0 to 8"),
    ({"sae": "free", "features": [5, 6]}, {}, "name the feature"),
    ({"sae": "free", "features": [5]}, {}, ""),
    ({"sae": "k", "top_k": 4}, {"index": 5}, ""),
)


@pytest.mark.parametrize(("more", "rule", "said"), RULES)
def test_a_feature_that_ends_a_request_is_one_that_is_read(
    more: dict[str, Any], rule: dict[str, Any], said: str
) -> None:
    modules = {"k": TOP_K, "free": replace(TOP_K, name="free", active=None)}
    server = Server(modules, vocab_size=1280, max_top_k=64, parse_array=as_array)
    spec = {"kind": "sae", "layer": 1, **more}
    readout = parse_readout("n", spec, CONTEXT, server)
    rules = [{"readout": "n", "above": 1.0, **rule}]
    if not said:
        assert parse_stops(rules, [readout], CONTEXT, modules)[0].index == 5
        return
    with pytest.raises(ReadoutValidationError, match=said) as caught:
        parse_stops(rules, [readout], CONTEXT, modules)
    assert caught.value.parameter == "stop_when.index"


@pytest.mark.parametrize("kind", ["probe", "lens"])
@pytest.mark.parametrize("hook", ["resid_mid.1", "blocks.1.hook_resid_mid"])
def test_an_address_names_the_layer_too(kind: str, hook: str) -> None:
    said = {key: value for key, value in RIGHT[kind].items() if "layer" not in key}
    given = said | {"kind": kind, "hook": hook}
    assert parse_readout("n", given, CONTEXT, SERVER).taps == ((1, "post_attn"),)
    (key,) = RIGHT[kind].keys() - said.keys()
    with pytest.raises(ReadoutValidationError, match=f"{key}.*leave it out"):
        parse_readout("n", given | {key: RIGHT[kind][key]}, CONTEXT, SERVER)


def test_a_kind_alone_is_no_readout() -> None:
    with pytest.raises(ReadoutValidationError, match="must be an object, such as"):
        parse_readout("n", "lens", CONTEXT, SERVER)


def test_a_lens_on_a_head_that_is_no_linear_map_is_refused() -> None:
    server = Server(
        {},
        vocab_size=1280,
        max_top_k=64,
        parse_array=as_array,
        refusals=Refusals(lens="no linear head"),
    )
    with pytest.raises(ReadoutValidationError, match="no linear head") as found:
        parse_readout("n", {"kind": "lens", **RIGHT["lens"]}, CONTEXT, server)
    assert found.value.parameter == "readouts.n.kind"
    for top_k in (65, -1):
        given = {"kind": "lens", **RIGHT["lens"], "top_k": top_k}
        with pytest.raises(ReadoutValidationError, match="0 to 64"):
            parse_readout("n", given, CONTEXT, SERVER)


@pytest.mark.parametrize(
    ("kind", "more", "per_token"),
    [
        ("lens", {"layers": "all", "top_k": 64, "tokens": [5]}, 3 * 129),
        ("norm", {"hooks": {"post_block": "all"}}, 6),
        ("probe", {}, 1),
        ("rows", {"reduce": "none"}, 1),
    ],
)
def test_the_numbers_of_all_samples_are_bounded(
    kind: str, more: dict[str, Any], per_token: int
) -> None:
    spec = {"kind": kind, **RIGHT[kind], **more, "positions": "all"}
    most = MAX_NUMBERS // (2 * 3 * per_token)
    for tokens in (most, most + per_token + 1):
        context = replace(CONTEXT, num_prompt_tokens=4, max_tokens=tokens - 4)
        readouts = [parse_readout("n", spec, context, SERVER)] * 3
        if tokens == most:
            size = check_size(readouts, 2, context, {})
            # As text, with the positions: those of a probe are most of it.
            assert 20 * (MAX_NUMBERS - 10_000) <= size <= 60 * MAX_NUMBERS
            continue
        with pytest.raises(ReadoutValidationError, match="lower max_tokens or n"):
            check_size(readouts, 2, context, {})


def test_a_reduced_readout_of_a_long_prompt_is_no_larger() -> None:
    context = replace(CONTEXT, num_prompt_tokens=1 << 30)
    spec = {"kind": "rows", **RIGHT["rows"], "positions": "all_prompt"}
    check_size([parse_readout("n", spec, context, SERVER)], 1, context, {})


WITH_WIDTHS = replace(
    CONTEXT,
    hook_points=dict.fromkeys(range(3), ("post_block", "q", "z")),
    point_shapes={layer: {"q": (4, 2), "z": (10, 5)} for layer in range(3)},
)


def test_a_part_says_how_rows_are_staged_and_read() -> None:
    def part(hook: str, **keys: Any) -> Any:
        raw = {"kind": "rows", "hooks": {hook: [1]}, **keys}
        return parse_readout("r", raw, WITH_WIDTHS, SERVER).part

    assert part("q") is None
    assert part("z") == RowPart(3, 10)
    assert part("q", heads=[1]) == RowPart(1, 4, (1,), 2)
    assert part("z", heads=[4, 0]) == RowPart(3, 10, (4, 0), 2)
    assert part("z", heads=[4, 0]).read == 4


def test_a_norm_knows_where_the_layer_before_has_no_such_rows() -> None:
    points = {0: ("z",), 1: ("z", "q"), 2: ("z", "q")}
    shapes = {**WITH_WIDTHS.point_shapes, 2: {"q": (4, 2), "z": (8, 4)}}
    context = replace(WITH_WIDTHS, hook_points=points, point_shapes=shapes)

    def staged(hook: str, layer: int) -> Any:
        raw = {"kind": "norm", "hooks": {hook: [layer]}}
        return parse_readout("r", raw, context, SERVER).staged

    assert staged("z", 1) == ((1, "z"), (0, "z"))
    assert staged("q", 1) == ((1, "q"),)
    assert staged("z", 2) == ((2, "z"),)


def test_stages_do_not_send_each_other_parts_of_rows() -> None:
    context = replace(WITH_WIDTHS, pipeline_parallel_size=2)
    raw = {"kind": "norm", "hooks": {"z": [1]}}
    with pytest.raises(ReadoutValidationError, match="stages of the pipeline") as at:
        parse_readout("r", raw, context, SERVER)
    assert at.value.parameter == "readouts.r.hooks"
    first = parse_readout("r", {**raw, "hooks": {"z": [0]}}, context, SERVER)
    assert first.staged == ((0, "z"),)


WITH_QUERIES = replace(
    CONTEXT,
    hook_points=dict.fromkeys(range(3), ("pre_attn", "q", "post_block")),
    point_shapes={layer: {"q": (16, 4)} for layer in range(3)},
)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"layers": [3]}, "layers"),
        ({"heads": [4]}, "heads are 0 to 3, not 4"),
        ({"heads": "some"}, "list of heads"),
        ({"top_k": 65}, "1 to 64"),
        ({"keys": [10]}, "positions must be 0 to 9"),
        ({"full": True}, "one layer, and this names 3"),
        ({"full": 1}, "true or false"),
        ({"keys": [0], "top_k": 3}, "not both"),
        ({"hook": "q"}, "no key 'hook'"),
    ],
)
def test_wrong_entries_of_attention_are_refused(
    more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ReadoutValidationError, match=message):
        parse_readout("n", {"kind": "attention", **more}, WITH_QUERIES, SERVER)


def test_what_attention_needs_is_said() -> None:
    given = {"kind": "attention"}
    with pytest.raises(ReadoutValidationError, match="--hook-points q"):
        parse_readout("n", given, CONTEXT, SERVER)
    started = replace(SERVER, optional_points=("q",))
    with pytest.raises(ReadoutValidationError, match="MLA are latent"):
        parse_readout("n", given, CONTEXT, started)
    refusing = replace(SERVER, refusals=Refusals(attention={1: "its own kernel"}))
    with pytest.raises(ReadoutValidationError, match="layer 1 .* its own kernel"):
        parse_readout("n", given, WITH_QUERIES, refusing)
    wide = replace(WITH_QUERIES, point_shapes={0: {"q": (8, 2)}, 1: {"q": (16, 4)}})
    with pytest.raises(ReadoutValidationError, match=r"layers have \[2, 4\] heads"):
        parse_readout("n", given | {"layers": [0, 1]}, wide, SERVER)


STREAM = ("pre_attn", "post_attn", "post_block")
WITH_HEADS = replace(
    CONTEXT,
    hook_points={0: (*STREAM, "attn_add"), 1: (*STREAM, "attn_add", "z"), 2: STREAM},
    point_shapes={1: {"z": (8, 4)}},
)
BY_HEADS = replace(SERVER, refusals=Refusals(projections=(1,)))


def test_heads_are_components_in_the_place_of_what_attention_adds() -> None:
    raw = {"kind": "attribution", "tokens": [5], "layers": [1], "heads": [3, 0]}
    found = parse_readout("n", raw, WITH_HEADS, BY_HEADS)
    names = ("head_3", "head_0", "attn_rest", "mlp_add")
    assert found.taps == ((0, "embed"), *((1, name) for name in names), (2, "rest"))
    assert found.heads == (3, 0)
    assert found.inside == ((1, "attn_add"), (1, "z"))
    assert found.staged == (
        *((0, "pre_attn"), (1, "pre_attn"), (1, "post_attn"), (1, "post_block")),
        *((2, "post_block"), *found.inside),
    )


@pytest.mark.parametrize(
    ("more", "context", "server", "message"),
    [
        ({"heads": [4]}, WITH_HEADS, BY_HEADS, "heads are 0 to 3, not 4"),
        ({"heads": [1, 1]}, WITH_HEADS, BY_HEADS, "named twice"),
        (
            {"heads": "all", "layers": [0, 1]},
            WITH_HEADS,
            BY_HEADS,
            r"layers\.z: layer 0",
        ),
        ({"heads": "all"}, CONTEXT, BY_HEADS, "--hook-points attn_add"),
        ({"heads": "all"}, WITH_HEADS, SERVER, "layer 1 has no single output proj"),
        (
            {"heads": "all"},
            WITH_HEADS,
            replace(SERVER, refusals=Refusals(heads="two ranks")),
            "two ranks",
        ),
    ],
)
def test_heads_that_cannot_be_components_are_refused(
    more: dict[str, Any], context: CaptureContext, server: Server, message: str
) -> None:
    raw = {"kind": "attribution", "tokens": [5], "layers": [1], **more}
    with pytest.raises(ReadoutValidationError, match=message):
        parse_readout("n", raw, context, server)


def test_a_full_pattern_that_is_too_large_is_refused_with_its_size() -> None:
    ctx = replace(WITH_QUERIES, num_prompt_tokens=1100)
    spec = {"kind": "attention", "layers": [0], "full": True, "positions": "all_prompt"}
    readout = parse_readout("n", spec, ctx, SERVER)
    with pytest.raises(ReadoutValidationError, match=str(4 * 1100 * 1107)):
        check_size([readout], 1, ctx, {})
