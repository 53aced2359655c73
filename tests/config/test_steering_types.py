# SPDX-License-Identifier: Apache-2.0
"""Sums, scales and hashes of steering vectors, as plug-ins compute them."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm import config
from vllm.config.steering import SteeringConfig
from vllm.config.steering_types import (
    hash_steering_config,
    merge_steering_specs,
    normalize_layer_entry,
    resolve_effective_vectors,
    scale_steering_spec,
    unpack_steering_vectors,
)

NUMBERS = st.floats(-8, 8, width=32)
ENTRIES = st.lists(NUMBERS, min_size=3, max_size=3) | st.fixed_dictionaries(
    {"vector": st.lists(NUMBERS, min_size=3, max_size=3), "scale": NUMBERS}
)
SPECS = st.dictionaries(
    st.sampled_from(["pre_attn", "post_block"]),
    st.dictionaries(st.integers(0, 2), ENTRIES, min_size=1),
)


def at(spec: Any, hook: str, layer: int) -> Any:
    """What a specification adds at a place, by the definition."""
    entry = spec.get(hook, {}).get(layer)
    if entry is None:
        return np.zeros(3)
    vector, scale = normalize_layer_entry(entry)
    return np.asarray(vector) * scale


@given(a=SPECS, b=SPECS)
def test_a_merge_is_the_sum_at_each_place(a: Any, b: Any) -> None:
    merged = merge_steering_specs(a, b)
    assert (merged is None) == (not a and not b)
    assert resolve_effective_vectors is merge_steering_specs
    for hook, layers in (merged or {}).items():
        for layer, vector in layers.items():
            assert vector.dtype == np.float64
            expected = at(a, hook, layer) + at(b, hook, layer)
            np.testing.assert_array_equal(vector, expected)
    places = {(h, x) for spec in (a, b) for h, layers in spec.items() for x in layers}
    assert places == {(h, x) for h, layers in (merged or {}).items() for x in layers}


@given(spec=SPECS, scale=st.sampled_from([-2.0, 0.5, 1.0]))
def test_a_scaled_specification_has_scaled_vectors(spec: Any, scale: float) -> None:
    scaled = unpack_steering_vectors(scale_steering_spec(spec, scale))
    for hook, layers in unpack_steering_vectors(spec).items():
        for layer, vector in layers.items():
            np.testing.assert_array_equal(scaled[hook][layer], vector * scale)


def test_equal_vectors_have_one_hash_and_others_another() -> None:
    plain: Any = {"post_block": {1: [1.0, 2.0]}}
    hashed = hash_steering_config(plain)
    assert 0 < hashed < 1 << 63
    assert hashed == hash_steering_config(
        {"post_block": {1: {"vector": [0.5, 1.0], "scale": 2.0}}}
    )
    others = [
        {"post_block": {2: [1.0, 2.0]}},
        {"pre_attn": {1: [1.0, 2.0]}},
        {"post_block": {1: [1.0, 3.0]}},
    ]
    hashes = {hash_steering_config(one) for one in others}
    hashes |= {hash_steering_config(plain, ("n", 1.0)), hashed}
    assert len(hashes) == 5
    assert hash_steering_config({}) == hash_steering_config(None) == 0


def test_what_is_no_vector_is_refused() -> None:
    with pytest.raises(ValueError, match="keys \\['op', 'vector'\\]"):
        normalize_layer_entry({"vector": [1.0], "op": "clamp"})
    with pytest.raises(ValueError, match="different lengths, 1 and 2"):
        merge_steering_specs({"post_block": {0: [1.0]}}, {"post_block": {0: [1.0, 2]}})


def test_the_configuration_is_imported_like_upstreams() -> None:
    assert config.SteeringConfig is SteeringConfig
