# SPDX-License-Identifier: Apache-2.0
import json
import time

import pytest

from vllm.v1.residual.plain_data import unique_object


def parsed(count: int, last: str) -> float:
    """Seconds of CPU time to refuse an object of many keys, with the last one twice."""
    pairs = [*((f"n{number}", 1) for number in range(count)), (last, 2)]
    began = time.process_time()
    with pytest.raises(ValueError, match=f"'{last}' twice"):
        unique_object(pairs)
    return time.process_time() - began


def test_a_key_that_is_given_twice_is_named() -> None:
    text = '{"a": 1, "b": {"c": 1, "c": 2}, "a": 3}'
    with pytest.raises(ValueError, match="'c' twice"):
        json.loads(text, object_pairs_hook=unique_object)
    assert unique_object([("a", 1), ("b", 2)]) == {"a": 1, "b": 2}


def test_time_grows_with_the_number_of_keys_and_not_with_its_square() -> None:
    """A comparison of each key with all others would take minutes."""
    count = 200_000
    assert parsed(count, f"n{count - 1}") < 10
