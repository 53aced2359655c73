# SPDX-License-Identifier: Apache-2.0
import base64
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.interop.reference_fork.clamps import as_entries
from vllm.v1.steering.errors import SteeringValidationError
from vllm.v1.steering.spec.parse import SteeredModel, by_phase, parse_vectors

WIDTH = 4
POINTS = ("pre_attn", "post_attn", "post_block")
MODEL = SteeredModel({0: POINTS, 1: POINTS, 2: ("post_block",)}, WIDTH, torch.float16)
HERE = "post_block"
ONE = [1.0, -2.0, 0.5, 4.0]


def parse(raw: Any) -> Any:
    return parse_vectors(raw, MODEL, "steering_vectors")


@pytest.mark.parametrize(
    "vector",
    [
        ONE,
        tuple(ONE),
        np.array(ONE),
        np.array(ONE, dtype=np.float16),
        torch.tensor(ONE, dtype=torch.bfloat16),
        torch.tensor(ONE, requires_grad=True),
    ],
)
@pytest.mark.parametrize("layer", [1, "1", np.int64(1)])
def test_lists_arrays_and_tensors_are_the_same(vector: Any, layer: Any) -> None:
    for entry in (vector, {"vector": vector}, [{"vector": vector, "scale": 1}]):
        parsed = parse({"pre_attn": {layer: entry}})
        assert parsed.vectors[1, "pre_attn"].tolist() == ONE
        assert not parsed.operations


@given(
    rows=st.lists(
        st.lists(st.integers(-64, 64).map(float), min_size=WIDTH, max_size=WIDTH),
        min_size=1,
        max_size=2,
    ),
    dtype=st.sampled_from(["float16", "float32", "float64", "bfloat16"]),
    scale=st.integers(-4, 4),
)
def test_the_packed_form_is_the_list_form(
    rows: list[list[float]], dtype: str, scale: int
) -> None:
    tensor = torch.tensor(rows, dtype=getattr(torch, dtype))
    if dtype == "bfloat16":
        tensor = tensor.view(torch.int16)
    packed = {
        "dtype": dtype,
        "shape": [len(rows), WIDTH],
        "layer_indices": list(range(len(rows))),
        "data": base64.b64encode(tensor.numpy().tobytes()).decode(),
        "scales": [scale] * len(rows),
    }
    lists = {i: {"vector": row, "scale": scale} for i, row in enumerate(rows)}
    found = parse({"post_block": packed}).vectors
    expected = parse({"post_block": lists}).vectors
    assert found.keys() == expected.keys()
    assert all((found[tap] == expected[tap]).all() for tap in found)


@pytest.mark.parametrize("convert", [np.array, torch.tensor])
def test_the_lists_of_packed_forms_may_be_arrays(convert: Any) -> None:
    rows = np.array([ONE, ONE], dtype="<f4")
    data = base64.b64encode(rows.tobytes()).decode()
    packed = {"dtype": "float32", "shape": convert([2, WIDTH]), "data": data}
    added = packed | {"layer_indices": convert([0, 2]), "scales": convert([1.0, 2.0])}
    assert parse({HERE: added}).vectors[2, HERE].tolist() == [2 * x for x in ONE]
    bounds, strengths = convert([[0.0, 1.0], [2.0, 3.0]]), convert([0.5, 1.0])
    clamps = packed | {"layer_indices": convert([1, 1])}
    clamps |= {"bounds": bounds, "strengths": strengths}
    first, second = parse(as_entries({HERE: clamps}, "steering_clamps")).operations
    assert (first.low, first.high, first.details.strength) == (0.0, 1.0, 0.5)
    assert (second.low, second.high, second.layer) == (2.0, 3.0, 1)


def test_entries_of_one_list_add_up() -> None:
    parsed = parse({"post_block": {0: [{"vector": ONE}, {"vector": ONE, "scale": 2}]}})
    assert parsed.vectors[0, "post_block"].tolist() == [3 * x for x in ONE]


@pytest.mark.parametrize(
    ("raw", "taps"),
    [
        ({"resid_post": {"all": ONE}}, [(n, "post_block") for n in range(3)]),
        ({"pre_attn": {"all": ONE}}, [(0, "pre_attn"), (1, "pre_attn")]),
        ({"post_block": {"0,2": ONE}}, [(0, "post_block"), (2, "post_block")]),
        ({"post_block": {"1-2": [{"vector": ONE}]}}, [(1, "post_block"), (2, HERE)]),
        ({"blocks.1.hook_resid_mid": ONE}, [(1, "post_attn")]),
        ({"post_block.2": {"vector": ONE}}, [(2, "post_block")]),
    ],
)  # fmt: skip
def test_layers_and_addresses_have_the_grammar_of_capture(raw: Any, taps: Any) -> None:
    assert sorted(parse(raw).vectors) == taps


def test_what_acts_on_generated_tokens_only_goes_to_their_tier() -> None:
    entry = {"vector": ONE, "positions": "all_generated"}
    clamp = {"vector": ONE, "op": "clamp", "max": 1, "positions": "all_generated"}
    base = parse({"post_block": {0: [{"vector": ONE}, entry, clamp]}})
    names = {"base": "steering_vectors", "prefill": "p", "decode": "d"}
    found = by_phase({"base": base, "decode": parse({"post_block": {0: ONE}})}, names)
    assert found["base"].vectors[0, "post_block"].tolist() == ONE
    assert found["decode"].vectors[0, "post_block"].tolist() == [2 * x for x in ONE]
    (operation,) = found["decode"].operations
    assert operation.positions is None and not found["base"].operations
    with pytest.raises(SteeringValidationError, match="of which none is generated"):
        by_phase({"prefill": base}, names)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"post_block": {"0-1": ONE, 1: ONE}}, "given twice"),
        ({"post_block": {"1-9": ONE}}, "layers 0 to 2"),
        ({"pre_attn": {"0-2": ONE}}, "layer 2 of this model does not have"),
        ({"post_block.9": ONE}, "no layer 9"),
        ([], "at least one hook point"),
        ({"pre_attn": {2: ONE}}, "no hook point 'pre_attn'"),
        ({"post_block": {3: ONE}}, "no layer 3"),
        ({"post_block": {True: ONE}}, "0-based"),
        ({"post_block": {"1.0": ONE}}, "0-based"),
        ({"post_block": {1: [ONE]}}, "4 numbers"),
        ({"post_block": {1: None}}, "list of numbers"),
        ({"post_block": {1: [True, 2.0, 3.0, 4.0]}}, "list of numbers"),
        ({"post_block": {1: [np.True_, 2.0, 3.0, 4.0]}}, "list of numbers"),
        ({"post_block": {1: [{"vector": ONE}, ONE]}}, "objects only"),
        ({"post_block": {1: [70000.0] * 4}}, "finite in torch.float16"),
        ({"post_block": {1: {"vector": ONE, "scale": "2"}}}, "scale"),
        ({1: {1: ONE}}, "not a hook point"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(raw: Any, said: str) -> None:
    with pytest.raises(SteeringValidationError, match=said) as caught:
        parse(raw)
    assert caught.value.parameter.startswith("steering_vectors")


@pytest.mark.parametrize(
    "vector",
    [
        torch.ones(WIDTH, dtype=torch.complex64),
        torch.ones(WIDTH, dtype=torch.complex64, requires_grad=True),
        torch.ones(WIDTH, device="meta"),
        torch.ones(WIDTH).to_sparse(),
        np.ones(WIDTH, dtype=np.complex64),
        np.array([object()] * WIDTH),
    ],
    ids=["complex", "complex-grad", "meta", "sparse", "complex-array", "objects"],
)
def test_what_holds_no_real_numbers_is_refused(vector: Any) -> None:
    with pytest.raises(SteeringValidationError, match="must be a list of numbers"):
        parse({"pre_attn": {1: vector}})


def test_the_place_of_a_probe_may_be_an_address() -> None:
    probe = {"probe": [1.0, 0.0, 0.0, 0.0][:WIDTH], "above": 0.5}
    places = [
        {"layer": 0, "hook": "post_attn"},
        {"layer": "0", "hook": "post_attn"},
        {"layer": 0, "hook": "resid_mid"},
        {"hook": "blocks.0.hook_resid_mid"},
    ]
    read = [
        parse({"post_block": {1: {"vector": ONE, "when": probe | place}}})
        for place in places
    ]
    assert all(one.operations == read[0].operations for one in read)
    assert read[0].operations
    for layer in (1, True, "x", -1, 9):
        with pytest.raises(SteeringValidationError, match="where the probe reads"):
            when = probe | {"layer": layer, "hook": "resid_mid.0"}
            parse({"post_block": {1: {"vector": ONE, "when": when}}})


def test_what_the_mlp_adds_is_steered_only_where_it_is_a_hook_point() -> None:
    model = SteeredModel({0: ("mlp_add",), 1: ("mlp_out",)}, WIDTH, torch.float32)
    steered = parse_vectors({"hook_mlp_out": {0: ONE}}, model, "x")
    (entry,) = steered.operations
    assert (entry.layer, entry.hook) == (0, "mlp_add")
    for wrong in ({"hook_mlp_out": {1: ONE}}, {"blocks.1.hook_mlp_out": ONE}):
        with pytest.raises(SteeringValidationError, match="--hook-points mlp_add"):
            parse_vectors(wrong, model, "x")


GATE = {"probe": ONE, "layer": 1, "hook": HERE, "above": 0.5}


@pytest.mark.parametrize(
    "entry",
    [
        {"vector": ONE, "scale": 0.5},
        {"vector": ONE, "op": "project_out"},
        {"vector": ONE, "positions": "all_generated", "norm_match": True},
        {"vectors": [ONE, ONE], "positions": [3, 5]},
        {"vector": ONE, "op": "swap", "target": ONE[::-1]},
        {"vector": ONE, "when": GATE},
    ],
)
def test_an_object_for_several_layers_is_read_once(entry: dict[str, Any]) -> None:
    entry = {k: np.array(v) if "vector" in k else v for k, v in entry.items()}
    layers = (1, 2)
    shared = parse({HERE: dict.fromkeys(layers, entry)})
    apart = parse({HERE: {layer: dict(entry) for layer in layers}})
    assert {tap: v.tolist() for tap, v in shared.vectors.items()} == {
        tap: v.tolist() for tap, v in apart.vectors.items()
    }
    for one, other in ((shared, apart), (shared.generated, apart.generated)):
        if other is None:
            assert one is None
            continue
        assert [x.tap for x in one.entries] == [x.tap for x in other.entries]
        assert one.operations == other.operations
        assert len({x.digest for x in one.operations}) == len(one.operations)
        assert len({id(x.data) for x in one.operations}) <= 1


def test_a_shared_object_is_checked_at_each_layer() -> None:
    entry = {"vector": ONE, "when": GATE}
    with pytest.raises(SteeringValidationError, match="not known") as refused:
        parse({HERE: {2: entry, 0: entry}})
    assert refused.value.parameter == f"steering_vectors.{HERE}.0.when"
    assert len(parse({HERE: {"1-2": entry}}).operations) == 2
