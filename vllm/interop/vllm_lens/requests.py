# SPDX-License-Identifier: Apache-2.0
"""Converts vllm-lens' keys in `extra_args` to capture and steering, at admission."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError

from vllm.interop.vllm_lens.steering_vector import MOST_BYTES, SteeringVector
from vllm.v1.capture.errors import CaptureValidationError
from vllm.v1.residual.numbers import is_integer
from vllm.v1.residual.plain_data import parse_text
from vllm.v1.residual.sizes import num_layers
from vllm.v1.residual.tap import AFTER
from vllm.v1.steering.errors import SteeringValidationError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams

INSTANCE = "vllm_lens"
"""The consumer that `--vllm-lens-api` adds."""

STREAM = "output_residual_stream"
VECTORS = "apply_steering_vectors"
UNCACHED = "skip_reading_prefix_cache"
KEYS = frozenset({STREAM, VECTORS, UNCACHED})

HOOK_POINT = "post_block"

Entries = dict[int, list[dict[str, Any]]]
"""Entries of `steering_vectors` by layer."""


def translate(params: "SamplingParams", config: "VllmConfig") -> None:
    """Convert vllm-lens' keys to the fields of capture and steering.

    The keys are removed from `extra_args`, because later code does not know them.

    Raises:
        CaptureValidationError: a key is invalid; the message names it and the remedy.
        SteeringValidationError: steering is invalid; the message names the remedy.

    """
    args = params.extra_args
    if not args or KEYS.isdisjoint(args):
        return
    consumers = [entry.instance_name for entry in config.capture_config.consumers]
    if INSTANCE not in consumers:
        given = sorted(KEYS.intersection(args))[0]
        raise CaptureValidationError(
            f"extra_args.{given}: start the server with --vllm-lens-api "
            "(LLM(vllm_lens_api=True)), or use capture and steering_vectors",
            parameter=f"extra_args.{given}",
        )
    total = num_layers(config.model_config)
    _steer(params, _entries(args.get(VECTORS)))
    layers = _layers(args.get(STREAM), total)
    if layers:
        spec = {"hooks": {HOOK_POINT: layers}, "positions": "all", AFTER: True}
        params.capture = {**(params.capture or {}), INSTANCE: spec}
    if _is_uncached(args.get(UNCACHED)):
        params.skip_reading_prefix_cache = True
    rest = {key: value for key, value in args.items() if key not in KEYS}
    params.extra_args = rest or None


def _is_uncached(raw: Any) -> bool:
    """Whether the whole prompt is to be computed: true or false, or its JSON text."""
    where = f"extra_args.{UNCACHED}"
    value = _parsed(raw, where) if isinstance(raw, str) else raw
    found = _flag(value)
    if found is None:
        raise CaptureValidationError(
            f"{where} must be true or false", parameter=where, value=repr(raw)[:120]
        )
    return found


def _flag(value: Any) -> bool | None:
    """A value as true or false, None being false; None if it is neither.

    The request's class turns true and false in `vllm_xargs` into 1 and 0.
    """
    is_number = isinstance(value, (int, float, np.generic)) and value in (0, 1)
    return bool(value) if value is None or is_number else None


def _layers(raw: Any, total: int) -> list[int]:
    """The layers whose output is requested: all, a list, or either as JSON text."""
    where = f"extra_args.{STREAM}"
    if isinstance(raw, str):
        raw = _parsed(raw, where)
    if (wanted := _flag(raw)) is not None:
        return list(range(total)) if wanted else []
    if not isinstance(raw, list) or not all(map(is_integer, raw)):
        raise CaptureValidationError(
            f"{where} must be true or a list of layers",
            parameter=where,
            value=repr(raw)[:120],
        )
    for layer in raw:
        if not 0 <= layer < total:
            raise CaptureValidationError(
                f"{where}: layer {layer} is outside of this model's layers 0 to "
                f"{total - 1}",
                parameter=where,
                value=layer,
            )
    return sorted({int(layer) for layer in raw})


def _entries(raw: Any) -> Entries:
    where = f"extra_args.{VECTORS}"
    if isinstance(raw, str):
        raw = _parsed(raw, where)
    given = [] if raw is None else raw if isinstance(raw, list) else [raw]
    entries: Entries = {}
    size = 0
    for number, one in enumerate(given):
        vector = one if isinstance(one, SteeringVector) else _vector(one, number)
        size += vector.activations.nbytes
        if size > MOST_BYTES:
            raise SteeringValidationError(
                f"{where}: the vectors of a request may have {MOST_BYTES} bytes, "
                "decompressed; register them as a module",
                parameter=where,
            )
        for layer, entry in vector.entries():
            entries.setdefault(layer, []).append(entry)
    return entries


def _vector(raw: Any, number: int) -> SteeringVector:
    where = f"extra_args.{VECTORS}[{number}]"
    if isinstance(raw, str):
        raw = _parsed(raw, where)
    if not isinstance(raw, Mapping) and hasattr(raw, "model_dump"):
        raw = raw.model_dump()  # vllm-lens' own class
    try:
        return SteeringVector.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise SteeringValidationError(
            f"{where}{'.' if field else ''}{field}: {first['msg']}", parameter=where
        ) from error


def _steer(params: "SamplingParams", entries: Entries) -> None:
    """Add the entries to the request's own steering at `post_block`."""
    if not entries:
        return
    vectors = dict(params.steering_vectors or {})
    at_hook = vectors.get(HOOK_POINT, {})
    if not isinstance(at_hook, Mapping) or not all(
        str(layer).isdecimal() for layer in at_hook
    ):
        raise SteeringValidationError(
            f"steering_vectors.{HOOK_POINT} must map single layers to vectors where "
            f"extra_args.{VECTORS} adds to it; give one of them",
            parameter=f"extra_args.{VECTORS}",
        )
    merged: dict[Any, Any] = {}
    for layer, own in at_hook.items():
        merged[int(layer)] = _as_list(own)
    for layer, more in entries.items():
        merged[layer] = [*merged.get(layer, []), *more]
    params.steering_vectors = {**vectors, HOOK_POINT: merged}


def _as_list(own: Any) -> list[Any]:
    """The entries at one layer; a list of numbers is one."""
    if isinstance(own, list) and any(isinstance(one, Mapping) for one in own):
        return own
    return [own if isinstance(own, Mapping) else {"vector": own}]


def _parsed(text: str, where: str) -> Any:
    try:
        return parse_text(text)
    except ValueError as error:
        raise CaptureValidationError(
            f"{where} is text, so it must be JSON: {error}",
            parameter=where,
            value=text[:120],
        ) from error
