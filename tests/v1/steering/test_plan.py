# SPDX-License-Identifier: Apache-2.0

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from vllm.v1.steering.plan import SteeringTiers, operation, pack, total

TAPS = st.tuples(st.integers(0, 5), st.sampled_from(["pre_attn", "post_block"]))
NUMBERS = st.floats(-8, 8, width=32)
SETS = st.dictionaries(TAPS, hnp.arrays(np.float32, 4, elements=NUMBERS), max_size=5)


@given(vectors=SETS)
def test_unpacked_is_what_was_packed_less_zeros(vectors: dict) -> None:
    packed = pack(vectors)
    unpacked = {} if packed is None else packed.unpack()
    expected = {tap: v for tap, v in vectors.items() if v.any()}
    assert unpacked.keys() == expected.keys()
    assert all((unpacked[tap] == expected[tap]).all() for tap in expected)


@given(vectors=SETS)
def test_equal_vectors_have_equal_digests_in_any_order(vectors: dict) -> None:
    backwards = dict(reversed(vectors.items()))
    assert pack(vectors) == pack(backwards)
    negated_zeros = {tap: np.where(v == 0, -0.0, v) for tap, v in vectors.items()}
    assert pack(vectors) == pack(negated_zeros)


@given(sets=st.lists(SETS, max_size=4))
def test_the_total_is_the_sum(sets: list[dict]) -> None:
    found = total([pack(vectors) for vectors in sets])
    for tap in {tap for vectors in sets for tap in vectors}:
        expected = sum(vectors.get(tap, np.zeros(4)) for vectors in sets)
        assert np.allclose(found.get(tap, 0), expected, atol=1e-5)


def one(value: float, **changes: object) -> SteeringTiers:
    vectors = {(0, "post_block"): np.full(4, value, dtype=np.float32)}
    fields = {"norm_match": False, "positions": None, "scale": 1.0, **changes}
    op = operation(
        (0, "pre_attn"),
        "add",
        vectors[0, "post_block"],
        fields["scale"],  # type: ignore[arg-type]
        (None, None),
        bool(fields["norm_match"]),
        fields["positions"],  # type: ignore[arg-type]
    )
    return SteeringTiers(base=pack(vectors, [op]))


def test_different_configurations_have_different_digests() -> None:
    tiers = [
        one(1),
        one(2),
        one(1, norm_match=True),
        one(1, positions=((1, 2),)),
        one(1, positions=((2, 3),)),
        one(1, scale=2.0),
        SteeringTiers(prefill=one(1).base),
        SteeringTiers(decode=one(1).base),
    ]
    assert len({each.digest for each in tiers}) == len(tiers)
