# SPDX-License-Identifier: Apache-2.0
"""vllm-lens' HTTP encoding of the values that hooks saved.

Each value is JSON, `{"__type__": "tensor", ...}`, or `{"__type__": "cloudpickle",
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
    """Encode a saved value as JSON; keys of objects become text."""
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
    """Decode a saved value.

    This loads pickled objects, so the server must be trusted.
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
