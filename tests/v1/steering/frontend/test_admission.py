# SPDX-License-Identifier: Apache-2.0
"""Invalid steering is refused at admission; admitted steering never fails."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm.v1.steering.errors import SteeringValidationError
from vllm.v1.steering.frontend.admission import SteeringAdmission, request_fields
from vllm.v1.steering.frontend.modules import Module, SteeringModules
from vllm.v1.steering.spec.parse import MAX_ENTRIES, SteeredModel

WIDTH = 4
POINTS = ("pre_attn", "post_attn", "post_block")
MODEL = SteeredModel({0: POINTS, 1: POINTS}, WIDTH, torch.float16)
FIELDS = request_fields()
ONE = [1.0, 2.0, -3.0, 4.0]
HUGE = [60000.0] * WIDTH  # float16 ends at 65504
PROMPT = 5
BASE, PREFILL, DECODE = (
    "steering_vectors",
    "prefill_steering_vectors",
    "decode_steering_vectors",
)


def admission(**modules: Any) -> SteeringAdmission:
    made = SteeringAdmission(MODEL, SteeringModules())
    for name, vectors in modules.items():
        parsed = made.parse_named({"vectors": vectors})
        made.modules.register(name, Module(made.checked(parsed)))
    return made


def admit(admission: SteeringAdmission, max_tokens: int = 4, **fields: Any) -> Any:
    params: Any = SimpleNamespace(**dict.fromkeys(FIELDS), max_tokens=max_tokens)
    params._steering = params.conversation_id = None
    params.steering_receipt = False
    for name, value in fields.items():
        setattr(params, name, value)
    admission.admit(params, PROMPT, resumable=False)
    assert all(getattr(params, name) is None for name in FIELDS)
    return params._steering


def at(entry: Any, hook: str = "post_attn", layer: Any = 1) -> dict[str, Any]:
    return {hook: {layer: entry}}


def edited(positions: Any) -> dict[str, Any]:
    return at({"vector": ONE, "op": "replace", "positions": positions})


def test_a_set_has_no_fields_but_its_own() -> None:
    with pytest.raises(SteeringValidationError, match="no others") as refused:
        admission().parse_named({"vectors": None, "vector": at(ONE)})
    assert refused.value.value == "['vector']"


@pytest.mark.parametrize(
    ("field", "positions", "missed"),
    [
        (BASE, [8], "8"),  # 5 prompt tokens, 4 generated: the last is at 7
        (BASE, [0, -6], "-6"),
        (PREFILL, [5], "5"),
        (DECODE, [4], "4"),
        (DECODE, [-1], "-1"),
        (DECODE, {"last": 2}, "-2"),
        (DECODE, "all_prompt", "all_prompt"),
    ],
)
def test_positions_without_a_token_are_refused(
    field: str, positions: Any, missed: str
) -> None:
    with pytest.raises(SteeringValidationError, match=f"at {missed}") as found:
        admit(admission(), **{field: edited(positions)})
    assert found.value.parameter == f"{field}.post_attn.1.positions"
    assert "max_tokens=4" in str(found.value), "the remedy"


@pytest.mark.parametrize(
    ("field", "positions"),
    [
        (BASE, [0, 7, -5]),
        (BASE, {"last": 100}),
        (PREFILL, [0, 4, -1]),
        (DECODE, [5, 7]),
    ],
)
def test_positions_with_a_token_are_taken(field: str, positions: Any) -> None:
    assert admit(admission(), **{field: edited(positions)})


def test_named_positions_fit_prompts_of_any_length() -> None:
    named = admission(far=edited([100]))
    assert admit(named, steering_name="far").base.operations[0].positions == (
        (100, 101),
    )


@pytest.mark.parametrize(
    "fields",
    [
        {BASE: at([{"vector": HUGE}, {"vector": HUGE}])},
        {BASE: at(HUGE), PREFILL: at(HUGE)},
        {BASE: at(HUGE), DECODE: at(HUGE)},
        {BASE: at({"vector": [1e30] * WIDTH})},
        {BASE: at({"vector": HUGE, "scale": 1.2})},
        {BASE: at({"vector": HUGE, "scale": 2, "op": "replace"})},
        {BASE: at(HUGE), "steering_name": "huge"},
    ],
)
def test_sums_that_the_dtype_cannot_hold_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(SteeringValidationError, match="finite"):
        admit(admission(huge=at(HUGE)), **fields)


def test_sums_that_cancel_are_fine() -> None:
    less = at({"vector": HUGE, "scale": -1})
    found = admit(admission(huge=at(HUGE)), steering_name="huge", **{BASE: less})
    assert found is None


BIG = 10**400
"""A number that JSON can represent and no float can."""

AT = "steering_vectors.post_attn.1"

BAD: list[tuple[dict[str, Any], str, str]] = [
    ({BASE: at([])}, "4 numbers", AT),
    ({BASE: {}}, "at least one hook point", "steering_vectors"),
    ({BASE: {"post_attn": {}}}, "at least one layer", "steering_vectors.post_attn"),
    ({BASE: at(ONE, hook="middle")}, "hook points are", "steering_vectors"),
    ({BASE: at(ONE, layer=2)}, "layers with hook points", "steering_vectors.post_attn"),
    ({BASE: at(ONE, layer="9" * 5000)}, "0-based", "steering_vectors.post_attn"),
    ({BASE: at(ONE, layer="-1")}, "0-based", "steering_vectors.post_attn"),
    ({BASE: at(ONE * 2)}, "4 numbers", AT),
    ({BASE: at([float("nan")] * 4)}, "finite", AT),
    ({BASE: at([float("inf")] * 4)}, "finite", AT),
    ({BASE: at([BIG] * 4)}, "list of numbers", AT),
    ({BASE: at(["1"] * 4)}, "numbers only", AT),
    ({BASE: at([True] * 4)}, "numbers only", AT),
    ({BASE: at([[1.0], [2.0, 3.0]])}, "numbers", AT),
    ({BASE: at({"scale": 1})}, "vector is missing", AT),
    ({BASE: at({"vector": ONE, "factor": 1})}, "no key 'factor'", AT),
    (
        {BASE: at({"op": "replace", "from": "run"})},
        "there are no modules here",
        f"{AT}.from",
    ),
    ({BASE: at({"vector": ONE, "scale": BIG})}, "finite number", f"{AT}.scale"),
    (
        {BASE: at({"vector": ONE, "scale": float("nan")})},
        "finite number",
        f"{AT}.scale",
    ),
    ({BASE: at({"vector": ONE, "scale": True})}, "finite number", f"{AT}.scale"),
    (
        {BASE: at({"vector": ONE, "op": "clamp", "min": -1e39})},
        "finite number",
        f"{AT}.min",
    ),
    ({BASE: at({"vector": ONE, "op": "spin"})}, "not one of", f"{AT}.op"),
    ({BASE: edited([BIG])}, "an integer", f"{AT}.positions"),
    ({BASE: edited({"last": True})}, "must be a list", f"{AT}.positions"),
    ({BASE: edited({"last": BIG})}, "must be a list", f"{AT}.positions"),
    ({BASE: edited(list(range(70000)))}, "at most 65536", f"{AT}.positions"),
    ({BASE: at([{"vector": ONE}] * (MAX_ENTRIES + 1))}, f"at most {MAX_ENTRIES}", AT),
    (
        {DECODE: {"post_attn": {1: ONE, "1": ONE}}},
        "given twice",
        "decode_steering_vectors.post_attn",
    ),
    ({"steering_name": "nobody"}, "--steering-modules", "steering_name"),
    ({"steering_name": ["x"]}, "no steering module", "steering_name"),
]


@pytest.mark.parametrize(("fields", "said", "parameter"), BAD, ids=range(len(BAD)))
def test_what_is_wrong_is_named_with_value_and_remedy(
    fields: dict[str, Any], said: str, parameter: str
) -> None:
    with pytest.raises(SteeringValidationError, match=said) as found:
        admit(admission(), **fields)
    assert found.value.parameter == parameter
    assert found.value.value is not None


@pytest.mark.parametrize("entry", [[0.0] * WIDTH, {"vector": ONE, "scale": 0}])
def test_what_adds_nothing_is_not_steering(entry: Any) -> None:
    assert admit(admission(), **{BASE: at(entry)}) is None


def test_numpy_integers_are_positions() -> None:
    tiers = admit(admission(), **{BASE: edited(list(np.arange(2)))})
    assert tiers.base.operations[0].positions == ((0, 2),)


@pytest.mark.parametrize("value", [0, "no", None, np.zeros(3)])
def test_a_receipt_is_true_or_false(value: Any) -> None:
    with pytest.raises(SteeringValidationError, match="steering_receipt must be true"):
        admit(admission(), steering_receipt=value)


def test_a_session_whose_prompt_comes_in_parts_is_refused_with_the_remedy() -> None:
    params: Any = SimpleNamespace(**{**dict.fromkeys(FIELDS), DECODE: at(ONE)})
    params.conversation_id = None
    params.steering_receipt = False
    with pytest.raises(SteeringValidationError, match="in one piece") as caught:
        admission().admit(params, PROMPT, resumable=True)
    assert caught.value.parameter == DECODE
    assert "post_attn" in str(caught.value.value)
