# SPDX-License-Identifier: Apache-2.0
"""Extracts tensors from nested payloads, so that they are sent as tensors."""

from typing import Any

import numpy as np
import torch

TENSOR = "\0tensor"
ARRAY = "\0array"


def set_aside(payload: Any, tensors: list[torch.Tensor]) -> Any:
    """Replace tensors and arrays in a payload by placeholders.

    Args:
        payload: nested dicts, lists and tuples.
        tensors: extended by the tensors.

    Returns:
        The payload with placeholders.

    Raises:
        TypeError: a key of a dict is of a type that msgpack does not preserve.

    """
    if isinstance(payload, torch.Tensor):
        tensors.append(payload.detach().cpu())
        return {TENSOR: len(tensors) - 1}
    if isinstance(payload, np.ndarray):
        tensors.append(torch.from_numpy(np.ascontiguousarray(payload)))
        return {ARRAY: len(tensors) - 1}
    if isinstance(payload, np.generic):
        return payload.item()
    if isinstance(payload, dict):
        for key in payload:
            if not isinstance(key, (str, int, float, bytes, type(None))):
                raise TypeError(f"a key is {key!r}, neither text nor a number")
        return {key: set_aside(value, tensors) for key, value in payload.items()}
    if isinstance(payload, (list, tuple)):
        return [set_aside(value, tensors) for value in payload]
    return payload


def put_back(payload: Any, tensors: list[torch.Tensor]) -> Any:
    """The inverse of `set_aside`, except that tuples have become lists."""
    if isinstance(payload, dict):
        if payload.keys() == {TENSOR}:
            return tensors[payload[TENSOR]]
        if payload.keys() == {ARRAY}:
            return tensors[payload[ARRAY]].numpy()
        return {key: put_back(value, tensors) for key, value in payload.items()}
    if isinstance(payload, list):
        return [put_back(value, tensors) for value in payload]
    return payload
