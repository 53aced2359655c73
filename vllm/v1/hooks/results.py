# SPDX-License-Identifier: Apache-2.0
"""Serialization of the values that hook functions saved, from workers to front ends.

The format is MessagePack with two extension types: tensors, in the form of safetensors,
and pickled objects, the latter only if the request's functions were sent as code.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import load, save

_TENSOR, _PICKLED = 1, 2

Saved = dict[str, dict[Any, Any]]
"""The content of `ctx.saved`, by the hook's key."""


class HookResult(msgspec.Struct, array_like=True):
    """The values that the hooks of one request saved, in one worker or in all."""

    own: dict[str, Any]
    shared: dict[str, Any]
    errors: dict[str, str]
    """Error messages, by the hook's key."""


def encode(result: HookResult, pickles: bool) -> bytes:
    """Encode a result.

    Raises:
        TypeError: it contains an object other than tensors, arrays and plain values,
            and `pickles` is false.

    """

    def hook(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            plain = value.detach().cpu().contiguous()
            return msgspec.msgpack.Ext(_TENSOR, save({"": plain}))
        if isinstance(value, np.generic):
            return value.item()
        if not pickles:
            raise TypeError(
                f"a hook saved a {type(value).__name__}; a function that is called by "
                "its name may save tensors, numbers, texts, lists and dicts"
            )
        import cloudpickle

        return msgspec.msgpack.Ext(_PICKLED, cloudpickle.dumps(value))

    return msgspec.msgpack.Encoder(enc_hook=hook).encode(result)


def decode(data: bytes, pickles: bool) -> HookResult:
    """Decode a result; `pickles` allows loading pickled objects."""

    def hook(code: int, payload: memoryview) -> Any:
        if code == _TENSOR:
            return load(bytes(payload))[""]
        if code != _PICKLED or not pickles:
            raise ValueError(f"a hook's result has an extension of type {code}")
        import cloudpickle

        return cloudpickle.loads(payload)

    return msgspec.msgpack.Decoder(HookResult, ext_hook=hook).decode(data)


def merged_results(parts: Sequence[bytes | None], pickles: bool) -> HookResult:
    """Merge the results of all workers; each pipeline stage runs its own layers.

    Lists under one key are joined in the order of the stages; of other values the last
    stage's is kept.
    """
    found = HookResult({}, {}, {})
    for part in parts:
        if part is None:
            continue
        one = decode(part, pickles)
        for into, saved in ((found.own, one.own), (found.shared, one.shared)):
            for key, values in saved.items():
                _merge(into.setdefault(key, {}), values)
        found.errors.update(one.errors)
    return found


def _merge(saved: dict[Any, Any], values: dict[Any, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, list) and isinstance(saved.get(name), list):
            saved[name] += value
        else:
            saved[name] = value
