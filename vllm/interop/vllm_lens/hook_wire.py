# SPDX-License-Identifier: Apache-2.0
"""What hooks saved, as vllm-lens sends it over HTTP.

By hook and key: JSON, `{"__type__": "tensor", ...}`, or `{"__type__": "cloudpickle",
"data": base64}`.
"""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from vllm.interop.vllm_lens import tensors

_TYPE = "__type__"


def encode(value: Any) -> Any:
    """A saved value as JSON; keys of objects become text."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case torch.Tensor():
            return {_TYPE: "tensor", **tensors.encode(value)}
        case np.ndarray():
            return encode(torch.from_numpy(value))
        case Mapping():
            return {str(key): encode(one) for key, one in value.items()}
        case list() | tuple():
            return [encode(one) for one in value]
    import cloudpickle

    data = base64.b64encode(cloudpickle.dumps(value)).decode()
    return {_TYPE: "cloudpickle", "data": data}


def decode(value: Any) -> Any:
    """The inverse of `encode`.

    Loads pickled objects: to be used on answers of a server that one trusts.
    """
    if isinstance(value, list):
        return [decode(one) for one in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TYPE)
    if kind == "tensor":
        return tensors.decode(value)
    if kind == "cloudpickle":
        import cloudpickle

        return cloudpickle.loads(base64.b64decode(value["data"]))
    return {key: decode(one) for key, one in value.items()}
