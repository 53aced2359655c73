# SPDX-License-Identifier: Apache-2.0
"""Checks of numbers in users' input. Bools are none; numpy's integers and floats are.

This module does not import torch, because `vllm.sampling_params` imports it.
"""

from collections.abc import Callable
from math import isfinite
from typing import Any, TypeAlias

import numpy as np

Fail: TypeAlias = Callable[[str, str, Any], Exception]
"""`fail(message, parameter, value)` creates the exception to raise."""

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def is_integer(value: Any, least: int | None = None, stop: int | None = None) -> bool:
    """Whether a value is an integer of `[least, stop)`; without a bound if None."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        return False
    number = int(value)
    return (least is None or least <= number) and (stop is None or number < stop)


def layer_index(value: Any) -> int | None:
    """A layer as an integer or as its text; None if the value is neither."""
    # Python refuses to convert very long digit strings.
    is_text = isinstance(value, str) and value.isascii() and len(value) < 10
    if is_text and value.isdigit():
        return int(value)
    return int(value) if is_integer(value) else None


def is_finite(value: Any) -> bool:
    """Whether a value is a real number that is finite as a float."""
    if not is_integer(value) and not isinstance(value, (float, np.floating)):
        return False
    try:
        return isfinite(value)
    except OverflowError:  # An integer of 400 digits.
        return False


def is_float32(value: Any) -> bool:
    """Whether a value is a real number that is finite in float32."""
    return is_finite(value) and abs(float(value)) <= LARGEST_FLOAT32


def finite_number(value: Any, at: str, fail: Fail) -> float:
    """A number of a user's input, as a float.

    Args:
        value: what the user wrote.
        at: the parameter's name in messages.
        fail: creates the exception to raise if it is no finite real number.

    """
    if not is_finite(value):
        raise fail(f"{at} must be a finite number", at, value)
    return float(value)
