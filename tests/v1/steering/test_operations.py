# SPDX-License-Identifier: Apache-2.0
"""Operations equal a slow float64 reference in transformers."""

import base64
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.v1.steering import _models
from tests.v1.steering._engine import compared, generate, logprobs, params, tokens
from tests.v1.steering._models import vector

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43]
SIZE = len(PROMPT)
HOOKS = ("pre_attn", "post_attn", "post_block")

Row = Callable[[torch.Tensor], torch.Tensor]


V, W = vector(1), vector(2)
U = (V / V.norm()).double()


def along(x: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    c = x @ U
    return x + (change(c) - c) * U


READ, WRITE = (torch.stack([vector(i), vector(i + 1)]) for i in (20, 30))
MASK = (torch.arange(_models.HIDDEN) % 3) / 2


def rotated(x: torch.Tensor, degrees: float) -> torch.Tensor:
    """The component in the plane of V and W, rotated to an angle from V."""
    second = W.double() - (W.double() @ U) * U
    second = second / second.norm()
    angle = torch.deg2rad(torch.tensor(degrees, dtype=torch.float64))
    inside = torch.stack([x @ U, x @ second])
    turned = inside.norm() * (angle.cos() * U + angle.sin() * second)
    return x - inside[0] * U - inside[1] * second + turned


def jumped(y: torch.Tensor) -> torch.Tensor:
    return torch.where(y > torch.tensor([-0.1, 0.3]), y, 0.0)


TIERS: dict[str, Callable[[int], bool]] = {
    "steering_vectors": lambda position: True,
    "prefill_steering_vectors": lambda position: position < SIZE,
    "decode_steering_vectors": lambda position: position >= SIZE,
}

ENTRIES: dict[str, tuple[dict[str, Any], Row]] = {
    "add": ({"vector": V, "scale": 1.5}, lambda x: x + 1.5 * V.double()),
    "add, matched": (
        {"vector": V, "scale": 0.3, "norm_match": True},
        lambda x: x + 0.3 * x.norm() * U,
    ),
    "project_out": ({"vector": V, "op": "project_out"}, lambda x: x - (x @ U) * U),
    "project_out, half": (
        {"vector": V, "op": "project_out", "scale": 0.5},
        lambda x: x - 0.5 * (x @ U) * U,
    ),
    "clamp": (
        {"vector": V, "op": "clamp", "min": -0.02, "max": 0.01},
        lambda x: along(x, lambda c: c.clamp(-0.02, 0.01)),
    ),
    "clamp from below": (
        {"vector": V, "op": "clamp", "min": 3},
        lambda x: along(x, lambda c: c.clamp(min=3)),
    ),
    "clamp to a value, half": (
        {"vector": V, "op": "clamp", "value": 2, "strength": 0.5},
        lambda x: along(x, lambda c: c + 0.5 * (2 - c)),
    ),
    "swap": (
        {"vector": V, "op": "swap", "target": W},
        lambda x: x + (x @ U) * ((W / W.norm()).double() - U),
    ),
    "rotate": (
        {"op": "rotate", "plane": torch.stack([V, W]), "degrees": 120},
        lambda x: rotated(x, 120),
    ),
    "low_rank": (
        {
            "op": "low_rank",
            "read": READ,
            "write": WRITE,
            "bias": [0.1, -0.2],
            "activation": "relu",
            "scale": 0.5,
        },
        lambda x: (
            x
            + 0.5
            * (READ.double() @ x + torch.tensor([0.1, -0.2])).relu()
            @ WRITE.double()
        ),
    ),
    "low_rank, jumprelu": (
        {
            "op": "low_rank",
            "read": READ,
            "write": WRITE,
            "threshold": [-0.1, 0.3],
            "activation": "jumprelu",
        },
        lambda x: x + jumped(READ.double() @ x) @ WRITE.double(),
    ),
    "replace, mixed and masked": (
        {"vector": V, "op": "replace", "alpha": 0.5, "mask": MASK},
        lambda x: (1 - 0.5 * MASK.double()) * x + 0.5 * MASK.double() * V.double(),
    ),
    "replace": ({"vector": V, "op": "replace", "scale": 2}, lambda x: 2 * V.double()),
    "replace by nothing": ({"vector": V * 0, "op": "replace"}, lambda x: x * 0),
    "replace, matched": (
        {"vector": V, "op": "replace", "norm_match": True},
        lambda x: x.norm() * U,
    ),
}


UNSURE = ("clamp", "low_rank", "low_rank, jumprelu")
SURE = {name: ENTRIES[name] for name in ENTRIES if name not in UNSURE}
"""Entries that change every row; others leave a single row as it is."""


def at_rows(change: Row, selects: Callable[[int], bool]) -> _models.Change:
    def changed(stream: torch.Tensor) -> torch.Tensor:
        rows = [
            change(row.double()) if selects(position) else row.double()
            for position, row in enumerate(stream)
        ]
        return torch.stack(rows).to(stream.dtype)

    return changed


Case = tuple[Any, _models.Change]
"""A request's entries at one hook point, and the change in transformers."""


def check(
    llm: Any, reference: Any, tier: str, tap: tuple[int, str], cases: dict[str, Case]
) -> None:
    """Run all cases in one batch, and compare each with transformers."""
    layer, hook = tap
    sampling = [params(**{tier: {hook: {layer: entry}}}) for entry, _ in cases.values()]
    outputs = generate(llm, [PROMPT] * len(cases), sampling)
    errors = {}
    for (name, (_, change)), output in zip(cases.items(), outputs, strict=True):
        error, effect = compared(output, reference, {tap: change})
        assert error < effect / 20, f"{name}: {error} of {effect} says little"
        errors[name] = error
    assert max(errors.values()) < 1e-4, f"relative errors {errors}"


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("tier", TIERS)
def test_an_operation_does_what_its_formula_says(
    steered: Any, tier: str, hook: str
) -> None:
    selects = TIERS[tier]
    cases = {
        name: (entry, at_rows(change, selects))
        for name, (entry, change) in ENTRIES.items()
    }
    check(*steered, tier, (1, hook), cases)


@pytest.mark.parametrize(
    ("positions", "chosen"),
    [
        ([0, 3, SIZE + 1], {0, 3, SIZE + 1}),
        ([-1, -4], {SIZE - 1, SIZE - 4}),
        ({"last": 3}, {SIZE - 3, SIZE - 2, SIZE - 1}),
        ({"ranges": [[2, 4], [SIZE, SIZE + 1]]}, {2, 3, 4, SIZE, SIZE + 1}),
        ({"ranges": [[-3, -2]]}, {SIZE - 3, SIZE - 2}),
        ("last_prompt", {SIZE - 1}),
        ("all_prompt", set(range(SIZE))),
        ("all_generated", {SIZE + i for i in range(5)}),
    ],
)
def test_positions_are_absolute_or_from_the_prompts_end(
    steered: Any, positions: Any, chosen: set[int]
) -> None:
    cases = {
        name: (
            {**entry, "positions": positions},
            at_rows(change, lambda p: p in chosen),
        )
        for name, (entry, change) in SURE.items()
    }
    check(*steered, "steering_vectors", (1, "post_block"), cases)


def test_everything_at_one_point_happens_in_the_documented_order(steered: Any) -> None:
    llm, reference = steered
    clamp = {"vector": V, "op": "clamp", "max": 0.5}
    matched = {"vector": V, "scale": 0.5, "norm_match": True}
    replace = {"vector": W, "op": "replace", "positions": [0, 5]}
    entries = [clamp, matched, {"vector": W}, replace]
    llm.set_steering({"pre_attn": {1: {"vector": V, "op": "project_out"}}})

    def change(position: int, x: torch.Tensor) -> torch.Tensor:
        x = W.double() if position in (0, 5) else x
        x = x + W.double() + 0.5 * x.norm() * U
        x = x - (x @ U) * U
        return along(x, lambda c: c.clamp(max=0.5))

    def changed(stream: torch.Tensor) -> torch.Tensor:
        rows = [change(p, row.double()) for p, row in enumerate(stream)]
        return torch.stack(rows).to(stream.dtype)

    try:
        case = {"everything": (entries, changed)}
        check(llm, reference, "steering_vectors", (1, "pre_attn"), case)
    finally:
        llm.clear_steering()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"op": "multiply"}, "multiply"),
    ({"op": "clamp"}, "min or max"),
    ({"op": "clamp", "min": 2, "max": 1}, "not be above"),
    ({"op": "clamp", "max": float("nan")}, "finite"),
    ({"op": "clamp", "max": 1, "scale": 2}, "no scale"),
    ({"max": 1}, "clamp"),
    ({"op": "project_out", "norm_match": True}, "norm_match"),
    ({"norm_match": 1}, "norm_match"),
    ({"norm_match": True, "vector": [0.0] * _models.HIDDEN}, "no direction"),
    ({"positions": []}, "not empty"),
    ({"positions": [1.5]}, "an integer"),
    ({"positions": {"last": 0}}, "last"),
    ({"positions": "everything"}, "list"),
    ({"positions": "last_generated"}, "not known in advance"),
    ({"positions": {"ranges": [[5, 2]]}}, "first <= last"),
    ({"positions": {"ranges": [[-2, 2]]}}, "both"),
    ({"op": "clamp", "value": 1, "min": 0}, "both min and max"),
    ({"op": "clamp", "value": 1, "strength": "x"}, "finite"),
    # PyTorch raises where a bound does not fit into float32.
    ({"op": "clamp", "max": 1e308}, "finite"),
    ({"op": "clamp", "value": -1e39}, "finite"),
    ({"op": "replace", "alpha": "x"}, "finite"),
    ({"op": "replace", "mask": [2.0] * _models.HIDDEN}, "between 0 and 1"),
    ({"op": "replace", "mask": [1.0]}, "hidden size|numbers"),
    ({"alpha": 0.5}, "goes with"),
    ({"op": "swap"}, "target is missing"),
    ({"op": "swap", "target": [0.0] * _models.HIDDEN}, "no direction"),
]

BAD_WHOLE: list[tuple[dict[str, Any], str]] = [
    ({"op": "rotate", "plane": torch.stack([V, V * 2]), "degrees": 90}, "parallel"),
    ({"op": "rotate", "plane": [V.tolist()], "degrees": 90}, "2 rows"),
    ({"op": "rotate", "plane": torch.stack([V, W])}, "degrees is missing"),
    ({"op": "low_rank", "read": [V.tolist()]}, "write is missing"),
    ({"op": "low_rank", "read": [V.tolist()] * 17, "write": [[0.0]]}, "at most 16"),
    ({"op": "low_rank", "read": [V.tolist()], "write": [[1.0]]}, "1 rows of"),
    (
        {"op": "low_rank", "read": [V.tolist()], "write": [V.tolist()], "bias": [1, 2]},
        "1 finite numbers",
    ),
    (
        {
            "op": "low_rank",
            "read": [V.tolist()],
            "write": [V.tolist()],
            "activation": "jumprelu",
        },
        "threshold",
    ),
    ({"op": "add"}, "vector is missing"),
    ({"vector": V, "op": "project_out", "positions": [4000]}, "no token is at"),
]


def test_more_operations_than_allowed_are_refused(steered: Any) -> None:
    llm, _ = steered

    def asked(count: int, **where: Any) -> Any:
        entries = [{"vector": V, "op": "project_out", **where} for _ in range(count)]
        return params(1, steering_vectors={"post_block": {1: entries}})

    with pytest.raises(ValueError, match="--max-steering-ops allows 12"):
        generate(llm, [PROMPT], [asked(13)])
    generate(llm, [PROMPT], [asked(12)])
    with pytest.raises(ValueError, match="--max-steering-ops"):
        generate(llm, [PROMPT], [asked(13, positions="last_prompt")])


ROWS = torch.stack([vector(50 + i) for i in range(SIZE)])


@pytest.mark.parametrize("form", ["entries", "matrix", "packed"])
def test_a_whole_prompt_is_replaced_at_every_layer(steered: Any, form: str) -> None:
    """The prompt is chunked over two steps, next to an unsteered request."""
    llm, reference = steered
    layers = range(_models.LAYERS)
    whole = {"op": "replace", "vectors": ROWS, "positions": "all_prompt"}
    wide = ROWS.repeat(_models.LAYERS, 1, 1).numpy()
    forms: dict[str, Any] = {
        "entries": {
            layer: [
                {"vector": ROWS[i], "op": "replace", "positions": [i]}
                for i in reversed(range(SIZE))
            ]
            for layer in layers
        },
        "matrix": dict.fromkeys(layers, whole),
        "packed": {
            "dtype": "float32",
            "shape": list(wide.shape),
            "layer_indices": list(layers),
            "data": base64.b64encode(wide.tobytes()).decode(),
            "op": "replace",
            "positions": {"last": SIZE},
        },
    }

    def changed(stream: torch.Tensor) -> torch.Tensor:
        return torch.cat([ROWS, stream[SIZE:]])

    sampling = [params(steering_vectors={"post_block": forms[form]}), params()] * 2
    prompts = [PROMPT, PROMPT[:5]] * 2
    outputs = generate(llm, prompts, sampling)
    changes = {(layer, "post_block"): changed for layer in layers}
    for output in outputs[::2]:
        assert compared(output, reference, changes)[0] < 1e-4
    alone = generate(llm, [PROMPT[:5]], [params()])
    assert tokens(outputs[1]) == tokens(alone[0])


MATRICES: dict[str, tuple[dict[str, Any], Callable[..., torch.Tensor]]] = {
    "add": ({"scale": 1.5}, lambda x, v: x + 1.5 * v),
    "add, matched": (
        {"scale": 0.3, "norm_match": True},
        lambda x, v: x + 0.3 * x.norm() * v / v.norm(),
    ),
    "replace, half": ({"op": "replace", "alpha": 0.5}, lambda x, v: (x + v) / 2),
    "project_out": (
        {"op": "project_out"},
        lambda x, v: x - (x @ v) / (v @ v) * v,
    ),
    "clamp": (
        {"op": "clamp", "min": 2},
        lambda x, v: (
            x + ((x @ v / v.norm()).clamp(min=2) - x @ v / v.norm()) * v / v.norm()
        ),
    ),
}


@pytest.mark.parametrize(
    "positions",
    [
        [4, 2, SIZE + 1, 7, SIZE + 3, 5],
        {"ranges": [[SIZE, SIZE + 2], [3, 5]]},
        [-1, 0, -3, SIZE, -5, 2],
    ],
    ids=["listed", "ranges", "from the end"],
)
def test_each_position_has_a_row_of_its_own(steered: Any, positions: Any) -> None:
    listed = positions
    if isinstance(positions, dict):
        listed = [p for a, b in positions["ranges"] for p in range(a, b + 1)]
    place = {p if p >= 0 else SIZE + p: i for i, p in enumerate(listed)}

    def case(entry: dict[str, Any], change: Callable[..., torch.Tensor]) -> Case:
        def changed(stream: torch.Tensor) -> torch.Tensor:
            rows = [
                change(row.double(), ROWS[place[p]].double()) if p in place else row
                for p, row in enumerate(stream)
            ]
            return torch.stack([row.to(stream.dtype) for row in rows])

        whole = {**entry, "vectors": ROWS[: len(listed)], "positions": positions}
        return [whole], changed

    cases = {name: case(*one) for name, one in MATRICES.items()}
    check(*steered, "steering_vectors", (1, "post_attn"), cases)


@pytest.mark.parametrize("packed", [False, True])
def test_clamps_have_fields_of_their_own(steered: Any, packed: bool) -> None:
    """The form of an earlier public fork, for a request and globally."""
    llm, reference = steered
    bounds, strengths = [[None, 0.5], [3.0, 3.0]], [1.0, 0.5]
    rows = torch.stack([V, W])
    unit = W.double() / W.norm()
    clamps: Any = {
        1: [
            {"vector": V, "max": 0.5},
            {"vector": W, "value": 3.0, "strength": 0.5},
        ]
    }
    if packed:
        clamps = {
            "dtype": "float64",
            "shape": [2, _models.HIDDEN],
            "layer_indices": [1, 1],
            "data": base64.b64encode(rows.double().numpy().tobytes()).decode(),
            "bounds": bounds,
            "strengths": strengths,
        }

    def changed(x: torch.Tensor) -> torch.Tensor:
        x = along(x + V.double(), lambda c: c.clamp(max=0.5))
        return x + 0.5 * (3 - x @ unit) * unit

    spec = {"post_block": clamps}
    fields = {"prefill_steering_clamps": spec, "decode_steering_clamps": spec}
    vectors = {"post_block": {1: V}}
    sampling = params(steering_vectors=vectors, **fields)
    (output,) = generate(llm, [PROMPT], [sampling])
    change = {(1, "post_block"): at_rows(changed, lambda position: True)}
    assert compared(output, reference, change)[0] < 1e-4
    llm.set_steering(vectors, clamps=spec)
    try:
        (same,) = generate(llm, [PROMPT], [params()])
    finally:
        llm.clear_steering()
    torch.testing.assert_close(logprobs(same), logprobs(output), rtol=1e-5, atol=1e-4)


def test_several_modules_at_their_scales(steered: Any) -> None:
    llm, _ = steered
    frontend = llm.llm_engine.steering.frontend
    halved = {"vector": W, "op": "project_out"}
    modules = {
        "one": {"vectors": {"post_block": {1: V}}},
        "two": {
            "vectors": {"post_block": {1: halved}},
            "clamps": {"pre_attn.2": [{"vector": V, "max": 0.1}]},
        },
        "turn": {"vectors": {"pre_attn.1": {"op": "swap", "vector": V, "target": W}}},
    }
    written = {
        "post_block": {1: [{"vector": V, "scale": 3.0}, {**halved, "scale": 0.5}]},
        "pre_attn": {2: {"op": "clamp", "vector": V, "max": 0.1, "strength": 0.5}},
    }
    for name, raw in modules.items():
        frontend.modules.put(name, frontend.prepare(name, raw, None)[0])
    half = {"name": "two", "scale": 0.5}
    asked = [
        {"steering_name": ["one", half, {"name": "one", "scale": 2}]},
        {"steering_name": half, "steering_module_ref": ("one", 3.0)},
        {"steering_vectors": written},
    ]
    try:
        outputs = generate(llm, [PROMPT] * 3, [params(**fields) for fields in asked])
        for one in map(logprobs, outputs[:2]):
            torch.testing.assert_close(one, logprobs(outputs[2]), rtol=1e-5, atol=1e-5)
        for fields, said in (
            ({"steering_name": []}, "1 to 16"),
            ({"steering_name": ["none"]}, "no steering module"),
            ({"steering_name": [{"name": "one", "scale": "x"}]}, "finite number"),
            ({"steering_name": {"name": "turn", "scale": 2}}, "no strength"),
            ({"steering_name": {"name": "two", "scale": 1e300}}, "finite number"),
            ({"steering_module_ref": ("none", 1.0)}, "steering_module_ref: there is"),
            ({"steering_module_ref": "one"}, "must be .name, scale."),
            ({"steering_clamps": {"post_block": {1: [[1.0]]}}}, "a clamp is an object"),
            ({"steering_clamps": {"post_block": {1: [{"vector": V}]}}}, "min or max"),
        ):
            with pytest.raises(ValueError, match=said):
                generate(llm, [PROMPT], [params(**fields)])
    finally:
        for name in modules:
            frontend.modules.unregister(name)


MATRIX = {"vectors": ROWS[:3], "positions": [1, 2, 3]}
BAD_MATRICES: list[tuple[dict[str, Any], str]] = [
    ({"positions": None}, "one for each of its 3 rows"),
    ({"positions": [1, 2]}, "2 positions for 3 rows"),
    ({"positions": [1, 2, 2]}, "given twice"),
    ({"positions": "all"}, "one for each"),
    ({"positions": "all_prompt"}, "3 rows, and the prompt 13 tokens"),
    ({"positions": {"last": 4}}, "4 positions"),
    ({"positions": [1, 2, 4000]}, "no token is at 4000"),
    ({"vector": V}, "leave one of them out"),
    ({"vectors": [[1.0]]}, "hidden size"),
    ({"vectors": ROWS[:3] * float("nan")}, "finite"),
    ({"op": "project_out", "vectors": ROWS[:3] * 0}, "no direction"),
    ({"op": "swap", "target": V}, "vector is missing"),
]


def test_rows_beyond_the_bank_are_refused_or_wait(steered: Any) -> None:
    llm, _ = steered
    core = llm.llm_engine.engine_core.engine_core
    admission = llm.llm_engine.steering.frontend.admission
    slots, model = core.scheduler.residual.steering.slots, admission.model
    size = SIZE * _models.HIDDEN * 4
    entry = {"op": "replace", "vectors": ROWS, "positions": "all_prompt"}

    def asked(seed: float) -> Any:
        one = {**entry, "vectors": ROWS * seed}
        return params(2, steering_vectors={"post_block": {1: one}})

    try:
        admission.model = dataclasses.replace(model, bank_bytes=size)
        slots._room = size
        outputs = generate(llm, [PROMPT] * 3, [asked(s) for s in (1.0, 2.0, 3.0)])
        assert len(outputs) == 3, "they ran one after another"
        admission.model = dataclasses.replace(model, bank_bytes=size - 1)
        with pytest.raises(ValueError, match="--steering-bank-mib"):
            generate(llm, [PROMPT], [asked(1.0)])
    finally:
        admission.model, slots._room = model, None


REFUSED = [
    *BAD_WHOLE,
    *(({"vector": V, **changes}, said) for changes, said in BAD),
    *(({**MATRIX, **changes}, said) for changes, said in BAD_MATRICES),
]


@pytest.mark.parametrize(("entry", "said"), REFUSED, ids=range(len(REFUSED)))
def test_bad_entries_are_refused(steered: Any, entry: Any, said: str) -> None:
    llm, _ = steered
    with pytest.raises(ValueError, match=said):
        generate(llm, [PROMPT], [params(steering_vectors={"post_block": {1: entry}})])
