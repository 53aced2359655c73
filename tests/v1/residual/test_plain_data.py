# SPDX-License-Identifier: Apache-2.0
import json
import time

import pytest

from vllm.v1.residual.plain_data import unique_object


def test_a_key_that_is_given_twice_is_named() -> None:
    text = '{"a": 1, "b": {"c": 1, "c": 2}, "a": 3}'
    with pytest.raises(ValueError, match="'c' twice"):
        json.loads(text, object_pairs_hook=unique_object)
    assert unique_object([("a", 1), ("b", 2)]) == {"a": 1, "b": 2}


def test_time_grows_with_the_number_of_keys_and_not_with_its_square() -> None:
    """A comparison of each key with all others would take minutes."""
    count = 200_000
    pairs = [*((f"n{number}", 1) for number in range(count)), (f"n{count - 1}", 2)]
    began = time.process_time()
    with pytest.raises(ValueError, match=f"'n{count - 1}' twice"):
        unique_object(pairs)
    assert time.process_time() - began < 10
