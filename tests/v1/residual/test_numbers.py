# SPDX-License-Identifier: Apache-2.0
"""What counts as a number in users' input, and what the parsers do with the rest."""

import math
from typing import Any

import numpy as np
import pytest

from vllm.interop.interp_engine import steering as interp_engine
from vllm.interop.transformer_lens import interventions
from vllm.v1.capture.consumers.storage.options import Options
from vllm.v1.readouts.frontend import rules
from vllm.v1.residual.numbers import finite_number, is_finite, is_float32, is_integer

NO_NUMBERS = (None, True, np.True_, "1", [1], 1j, np.complex64(1), {})
NOT_FINITE = (math.nan, math.inf, -math.inf, np.float16("inf"), 10**400, -(10**400))


def test_integers_are_python_s_and_numpy_s_within_their_bounds() -> None:
    for value in (0, -3, 10**400, np.int8(2), np.uint64(5)):
        assert is_integer(value)
    for value in (*NO_NUMBERS, 1.0, np.float32(1), math.nan):
        assert not is_integer(value)
    assert [is_integer(n, 1, 4) for n in range(6)] == [0, 1, 1, 1, 0, 0]
    assert [is_integer(np.int64(n), 1) for n in range(3)] == [0, 1, 1]


def test_finite_numbers_fit_into_a_float() -> None:
    for value in (0, 1.5, 10**300, np.float16(2), np.int64(3)):
        assert is_finite(value)
    for value in (*NO_NUMBERS, *NOT_FINITE):
        assert not is_finite(value)
        assert not is_float32(value)
    assert is_float32(-3.4e38)
    assert not is_float32(3.5e38)


@pytest.mark.parametrize("value", [*NO_NUMBERS, *NOT_FINITE])
def test_no_parser_fails_of_what_is_no_finite_number(value: Any) -> None:
    """Integers above 2**1024 ended in an `OverflowError`, which is HTTP 500."""

    def fail(message: str, parameter: str, given: Any) -> ValueError:
        return ValueError(message, parameter, given)

    with pytest.raises(ValueError, match="a must be a finite number"):
        finite_number(value, "a", fail)
    if value is not None:
        with pytest.raises(ValueError, match="stop_when.above must be a finite number"):
            rules._bound({"above": value}, "above", "stop_when")
        with pytest.raises(ValueError, match="must be a number of seconds above 0"):
            Options("x", {"wait": value}, ["wait"]).seconds("wait")
    with pytest.raises(ValueError, match="must be a finite number"):
        interp_engine._number({"scale": value}, "scale", None)
    with pytest.raises(ValueError, match="give a finite number"):
        interventions._number("scale", value)
