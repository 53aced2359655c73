# SPDX-License-Identifier: Apache-2.0
"""vllm-lens' HTTP encoding of the values that hooks saved.

`{hook: {key: value}}`, where a value is JSON, `{"__type__": "tensor", ...}`, or
`{"__type__": "cloudpickle", "data": base64}`. A list or an object that holds anything
but JSON is pickled whole, because vllm-lens' client does not look into it.
"""

import base64
import json
from collections.abc import Mapping
from typing import Any

import torch

from vllm.interop.vllm_lens import tensors

_TYPE = "__type__"


def encode(results: Mapping[str, Mapping[Any, Any]]) -> dict[str, dict[str, Any]]:
    """Encode what each hook saved as JSON; keys become text."""
    return {
        hook: {str(key): _encoded(value) for key, value in saved.items()}
        for hook, saved in results.items()
    }


def decode(results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Decode what each hook saved.

    This loads pickled objects, so the server must be trusted.
    """
    return {
        hook: {key: _decoded(value) for key, value in saved.items()}
        for hook, saved in results.items()
    }


def _encoded(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {_TYPE: "tensor", **tensors.encode(value)}
    if isinstance(value, (bool, int, float, str, list, dict)) or value is None:
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            pass
        else:
            return value
    import cloudpickle

    data = base64.b64encode(cloudpickle.dumps(value)).decode()
    return {_TYPE: "cloudpickle", "data": data}


def _decoded(value: Any) -> Any:
    kind = value.get(_TYPE) if isinstance(value, dict) else None
    if kind == "tensor":
        return tensors.decode(value)
    if kind == "cloudpickle":
        import cloudpickle

        return cloudpickle.loads(base64.b64decode(value["data"]))
    return value
