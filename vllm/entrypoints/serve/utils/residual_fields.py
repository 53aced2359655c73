# SPDX-License-Identifier: Apache-2.0
"""Which fields of a request concern the residual stream, and which are refused.

Upstream's requests allow fields that nobody reads. A field that would capture, steer
or patch under another name, in another system, or with a letter less, must not be
ignored: the answer would look right and be another one.

A field that is implemented is known by its request's class; a key of `vllm_xargs` and
`extra_args` that is implemented is listed in `HONOURED_ARGS`.
"""

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from pydantic import model_validator

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.capture.errors import CaptureValidationError
from vllm.v1.steering.errors import SteeringValidationError
from vllm.v1.steering.frontend import admission as steering_admission

FIELDS = (
    "capture",
    "capture_wait",
    "capture_stream",
    "readouts",
    "stop_when",
    *steering_admission.FIELDS,
)
"""Fields of the generation requests; other requests refuse them."""

HONOURED_ARGS: frozenset[str] = frozenset(
    {"output_residual_stream", "apply_steering_vectors"}
)
"""Keys of `vllm_xargs` and `extra_args` that are carried out."""

_CLAMP = 'put {"vector": [...], "op": "clamp", "min": a, "max": b} into '
_NO_PATCH = "patching is not implemented; the operation replace sets rows to a vector"
_CAPTURE_ALL = (
    'use capture: {"inline": {"hooks": {"post_block": [15]}, "positions": "all"}}'
)
_LENS = "put it into vllm_xargs, on a server with --vllm-lens-api"

FOREIGN: dict[str, str] = {
    # Of the public fork whose names are ours too; not implemented, or not here.
    "steering_clamps": _CLAMP + "steering_vectors",
    "prefill_steering_clamps": _CLAMP + "prefill_steering_vectors",
    "decode_steering_clamps": _CLAMP + "decode_steering_vectors",
    "steering": "conditional steering is not implemented; use steering_vectors",
    "conversation_id": "conversations are not kept; send what steers with each request",
    "patch": _NO_PATCH,
    "patch_vectors": _NO_PATCH,
    "steering_module_ref": "use steering_name, and scale the module's vectors",
    # Fields of our own routes and of Python, and what is easily mistaken for ours.
    "steering_scale": 'give it with the vector: {"vector": [...], "scale": s}',
    "steering_layer": "a layer is a key: steering_vectors: {HOOK: {LAYER: vector}}",
    "vectors": "use steering_vectors",
    "prefill_vectors": "use prefill_steering_vectors",
    "decode_vectors": "use decode_steering_vectors",
    "clamps": _CLAMP + "steering_vectors",
    "capture_consumers": "the server is started with --capture-consumers; a request "
    "says capture: {CONSUMER: {...}}",
    # Of vllm-lens, as keys of vllm_xargs and extra_args, and of its client.
    "output_residual_stream": f"{_LENS}; or {_CAPTURE_ALL}",
    "apply_steering_vectors": f"{_LENS}; or use steering_vectors: {{HOOK: {{LAYER: "
    "vector}}",
    "apply_hooks": "hooks that are code are not run; use steering_vectors and capture",
    "capture_layers": _CAPTURE_ALL,
}
"""Names that mean something elsewhere, and what to use here."""

WORDS = ("steer", "capture", "readout", "patch")
"""A field with one of these in its name is one of ours, misspelt."""

ARGS = ("vllm_xargs", "extra_args")
"""Fields that hold arguments for extensions."""


def refuse_unsupported(model_class: Any, data: Any) -> None:
    """Refuse fields that this kind of request would ignore.

    Raises:
        CaptureValidationError: names the field.
        SteeringValidationError: names the field.

    """
    if not isinstance(data, Mapping):
        return
    known = _names_of(model_class)
    for name in FIELDS:
        if data.get("use_beam_search") and data.get(name):
            raise _error(
                name,
                f"{name}: beam search can neither be captured nor steered; leave out "
                "use_beam_search",
            )
        if name in data and name not in known:
            raise _error(name, f"{name}: {_elsewhere(model_class)}")
    refuse_unknown(data.keys() - known, known & set(FIELDS))
    for name in ARGS:
        refuse_args(data.get(name), name)
    _refuse_nested(model_class, data)
    _refuse_shared_request_id(data)


def refuse_unknown(
    names: Iterable[Any], known: Collection[str], inside: str = ""
) -> None:
    """Refuse names that are ours misspelt, or somebody else's.

    Args:
        names: fields or keys that nobody reads.
        known: what may have been meant.
        inside: the field that holds them, if any.

    Raises:
        CaptureValidationError: names the field, and what to use.
        SteeringValidationError: names the field, and what to use.

    """
    for name in sorted(one for one in names if isinstance(one, str)):
        remedy = FOREIGN.get(name)
        if remedy is None and not any(word in name.lower() for word in WORDS):
            continue
        shown = name if len(name) <= 60 else name[:57] + "..."
        where = f"{inside}.{shown}" if inside else shown
        raise _error(
            where,
            f"{where}: there is no such field, and nothing is ignored; "
            f"{remedy or _meant(name, known)}",
        )


def refuse_args(args: Any, inside: str = "extra_args") -> None:
    """Refuse keys of a request's arguments for extensions that are ours misspelt.

    Raises:
        CaptureValidationError: names the key.
        SteeringValidationError: names the key.

    """
    if not isinstance(args, Mapping):
        return
    for name in FIELDS:
        if name in args and name not in HONOURED_ARGS:
            raise _error(
                f"{inside}.{name}",
                f"{inside}.{name}: it is a field of its own; put it beside {inside}",
            )
    refuse_unknown(args.keys() - HONOURED_ARGS, FIELDS, inside)


def check_body(model_class: Any, data: Any) -> None:
    """As `refuse_unsupported`, where pydantic validates a body.

    It wraps a `ValueError` into a list of errors with an error in it; this one
    reaches the handler of HTTP errors as it is.

    Raises:
        VLLMValidationError: names the field.

    """
    try:
        refuse_unsupported(model_class, data)
    except (CaptureValidationError, SteeringValidationError) as error:
        raise VLLMValidationError(
            error.args[0], parameter=error.parameter, value=error.value
        ) from None


def refusing() -> Any:
    """A validator for kinds of requests that have no base class in common."""

    def check(cls: Any, data: Any) -> Any:
        check_body(cls, data)
        return data

    return model_validator(mode="before")(check)


def _names_of(model_class: Any) -> set[str]:
    """The names under which a kind of request reads fields."""
    fields = model_class.model_fields
    return fields.keys() | {one.alias for one in fields.values() if one.alias}


def _elsewhere(model_class: Any) -> str:
    found = f"{model_class.__name__} has no such field; "
    if "sampling_params" in model_class.model_fields:
        return found + "put it into sampling_params"
    return found + (
        "only /v1/completions and /v1/chat/completions can be captured, and these and "
        "/v1/chat/completions/batch steered"
    )


def _meant(name: str, known: Collection[str]) -> str:
    """What a misspelt name probably stands for."""
    close = difflib.get_close_matches(name[:60], sorted(known), n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]}?"
    if known:
        return f"the fields are {sorted(known)}"
    return "leave it out: this request can neither be captured nor steered"


def _refuse_nested(model_class: Any, data: Mapping[str, Any]) -> None:
    """Refuse what stands one level too deep, where nobody looks."""
    params = data.get("sampling_params")
    if "sampling_params" in model_class.model_fields and isinstance(params, Mapping):
        known = set(SamplingParams.__struct_fields__)
        refuse_unknown(params.keys() - known, FIELDS, "sampling_params")
        refuse_args(params.get("extra_args"), "sampling_params.extra_args")
    extra = data.get("extra_body")
    if isinstance(extra, Mapping) and "extra_body" not in model_class.model_fields:
        for name in sorted(set(map(str, extra)) & {*FIELDS, *FOREIGN}):
            raise _error(
                f"extra_body.{name}",
                f"extra_body.{name}: extra_body is a parameter of OpenAI's client, "
                "which puts its keys at the top level; put the field there",
            )


def _refuse_shared_request_id(data: Mapping[str, Any]) -> None:
    """Refuse one name for the rows of several prompts: the last would overwrite."""
    prompts, capture = data.get("prompt"), data.get("capture")
    if not isinstance(prompts, list) or len(prompts) < 2:
        return
    if isinstance(prompts[0], int) or not isinstance(capture, Mapping):
        return  # One prompt, given as token ids.
    for name, spec in capture.items():
        if isinstance(spec, Mapping) and spec.get("request_id") is not None:
            where = f"capture.{str(name)[:60]}.request_id"
            raise CaptureValidationError(
                f"{where}: {len(prompts)} prompts cannot share one; "
                "leave it out (each prompt then has an id of its own), or send one "
                "request per prompt",
                parameter=where,
                value=str(spec["request_id"])[:60],
            )


def _error(name: str, message: str) -> VLLMValidationError:
    words = ("capture", "readout", "residual_stream", "stop_when")
    captures = any(word in name for word in words)
    kind = CaptureValidationError if captures else SteeringValidationError
    return kind(message, parameter=name)
