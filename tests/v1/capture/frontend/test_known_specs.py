# SPDX-License-Identifier: Apache-2.0
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.v1.capture.frontend.test_admission import WIDTH, admission
from vllm.sampling_params import SamplingParams
from vllm.v1.capture.consumers.inline import InlineConsumer
from vllm.v1.capture.errors import CaptureValidationError
from vllm.v1.capture.frontend.admission import Admission
from vllm.v1.capture.frontend.known_specs import MOST_KNOWN, MOST_VALUES, KnownSpecs

LIMIT = 40 * 4 * WIDTH
CAPTURE = {"inline": {"hooks": {"post_block": [0]}}}


def inline() -> InlineConsumer:
    return InlineConsumer(None, {"max_request_bytes": LIMIT})


atoms = st.sampled_from([0, 1, True, False, 1.0, 0.0, None, -1, 3, "all", "1", 9])
layers = st.one_of(atoms, st.lists(atoms, max_size=3), st.just("0:2"))
hooks = st.dictionaries(st.sampled_from(["post_block", "pre_attn", "no"]), layers)
positions = st.one_of(
    st.sampled_from(["all", "all_prompt", "last_prompt", "all_generated", "never"]),
    st.lists(atoms, max_size=3),
)
specs = st.fixed_dictionaries({"hooks": hooks}, optional={"positions": positions})
requests = st.tuples(specs, st.integers(1, 6), st.sampled_from([1, 8, None]))


def outcome(own: Admission, request: tuple[Any, int, int | None]) -> Any:
    """The plan of a request and its field, or the refusal."""
    spec, prompt, tokens = request
    params = SamplingParams(max_tokens=tokens, capture={"inline": deepcopy(spec)})
    try:
        plan = own.plan("r", params, prompt, "ipc://x")
    except CaptureValidationError as error:
        return str(error)
    return plan, params.capture


@given(st.lists(requests, min_size=1, max_size=8))
def test_an_equal_request_gets_what_the_first_one_got(
    some: list[tuple[Any, int, int | None]],
) -> None:
    own = admission(inline=inline())
    for request in some + some:
        assert outcome(own, request) == outcome(admission(inline=inline()), request)


def test_an_equal_request_is_not_validated_again() -> None:
    calls = []

    class Counting(InlineConsumer):
        validates_purely = True

        def validate_client_spec(self, raw: Any, ctx: Any) -> Any:
            calls.append(ctx.vllm_internal_request_id)
            return super().validate_client_spec(raw, ctx)

    own = admission(inline=Counting(None, {}))
    for number, prompt in enumerate([4, 4, 5, 4]):
        params = SamplingParams(max_tokens=2, capture=deepcopy(CAPTURE))
        plan = own.plan(f"r{number}", params, prompt, "ipc://x")
        assert plan is not None and plan.client_request_id == f"r{number}"
        assert plan.num_prompt_tokens == prompt
    assert calls == ["r0", "r2"]


def test_a_consumer_with_a_validation_of_its_own_is_always_asked() -> None:
    calls = []

    class Own(InlineConsumer):
        def validate_client_spec(self, raw: Any, ctx: Any) -> Any:
            calls.append(raw)
            return super().validate_client_spec(raw, ctx)

    own = admission(inline=Own(None, {}))
    for _ in range(2):
        params = SamplingParams(max_tokens=2, capture=deepcopy(CAPTURE))
        own.plan("r", params, 4, "ipc://x")
    assert len(calls) == 2


@dataclass
class Spec:
    hooks: dict[str, Any]


def test_only_plain_specs_of_moderate_size_have_a_key() -> None:
    known = KnownSpecs({"pure"})
    hooks = {"post_block": [1, 2]}
    assert known.key({"pure": {"hooks": hooks}}) is not None
    assert known.key({"other": {"hooks": hooks}}) is None
    assert known.key({"pure": Spec(hooks)}) is None
    assert known.key({"pure": {"hooks": {"post_block": np.arange(3)}}}) is None
    assert known.key({"pure": {"hooks": {"post_block": range(3)}}}) is None
    assert known.key({"pure": {"positions": list(range(MOST_VALUES))}}) is None
    assert known.key(None) is None
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    assert known.key({"pure": deep}) is None


def test_their_number_is_bounded() -> None:
    known = KnownSpecs({"pure"})
    for number in range(3 * MOST_KNOWN):
        key = known.key({"pure": number})
        known.put(key, ())
        assert known.find(key) == ()
    assert len(known._groups) <= MOST_KNOWN
