# SPDX-License-Identifier: Apache-2.0
"""Rejects request fields that ask for what is not done.

Upstream's request classes ignore unknown fields. A field that captures, steers or
patches in another system, or is misspelt, must not be ignored: the response would look
valid but would not do what was asked. A request with a field of ours therefore has
known fields only, and any other none that means something like ours.

A supported field is a field of the request's class. A supported key of `vllm_xargs` and
`extra_args` is listed in `HONOURED_ARGS`.
"""

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from openai.types import chat, completion_create_params
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
    "capture_cache",
    "readouts",
    "stop_when",
    *steering_admission.request_fields(),
    "steering_receipt",
    "conversation_id",
)
"""Fields of generation requests; other requests reject them."""

HONOURED_ARGS: frozenset[str] = frozenset(
    {
        *("output_residual_stream", "apply_steering_vectors", "apply_hooks"),
        "skip_reading_prefix_cache",
    }
)
"""Supported keys of `vllm_xargs` and `extra_args`."""

_CAPTURE_ALL = (
    'use capture: {"inline": {"hooks": {"post_block": [15]}, "positions": "all"}}'
)
_NO_QK = (
    "queries and keys are not captured; capture pre_attn, and compute them from the "
    "model's weights"
)
_LENS = "put it into vllm_xargs, on a server with --vllm-lens-api"

_STEER = "use steering_vectors: {HOOK: {LAYER: vector}}"
_SAE = (
    'use steering_vectors with {"op": "feature", "sae": NAME, "feature": i, "value": v}'
)

FOREIGN: dict[str, str] = {
    # The earlier public fork's.
    "sae_clamp_specs": _SAE,
    "sae_full_reconstruction_specs": _SAE,
    # Of our routes, whose requests have longer names.
    "vectors": "use steering_vectors",
    "prefill_vectors": "use prefill_steering_vectors",
    "decode_vectors": "use decode_steering_vectors",
    "clamps": "use steering_clamps",
    "prefill_clamps": "use prefill_steering_clamps",
    "decode_clamps": "use decode_steering_clamps",
    # vllm-lens', in vllm_xargs and extra_args, and its client's.
    "output_residual_stream": f"{_LENS}; or {_CAPTURE_ALL}",
    "apply_steering_vectors": f"{_LENS}; or {_STEER}",
    "apply_hooks": f"{_LENS}; or use steering_vectors and readouts",
    "capture_layers": _CAPTURE_ALL,
    "output_qk": _NO_QK,
    "capture_qk": _NO_QK,
    "activations_transport": "leave it out; for rows in binary form use capture and "
    "the header Accept: application/safetensors",
    **dict.fromkeys(
        ("hook", "hooks", "add_hook", "fwd_hooks"),
        f"use readouts and steering_vectors; or send them as apply_hooks, and {_LENS}",
    ),
    # Of other servers and clients.
    "extra_args": "it is a parameter of SamplingParams; over HTTP use vllm_xargs",
    **dict.fromkeys(
        (
            *("hidden_states", "output_hidden_states", "return_hidden_states"),
            *("run_with_cache", "names_filter"),
        ),
        _CAPTURE_ALL,
    ),
    **dict.fromkeys(
        (
            *("control_vector", "control_vectors", "cvec", "repe", "hotwire"),
            *("intervene", "intervention", "interventions", "pyvene", "edits"),
        ),
        _STEER,
    ),
    "controller": _SAE,
    "sae_features": _SAE,
    "nnsight": "code of a client does not run here; use capture, readouts and "
    "steering_vectors",
}
"""By name of a field or key that another system gives a meaning to: what to use."""

_DISTINCT = tuple({*FIELDS, *HONOURED_ARGS} - {"steering", "conversation_id"})
"""Names that others' fields do not resemble, as `string` and `conversation` would."""

MOST_COMPARED = 256
"""Most unknown names of an object that are compared letter by letter, at 30 µs each."""

WORDS = ("steer", "capture", "readout", "patch", "residual_stream", "apply_hook")
"""An unknown field or key whose name contains one of these is treated as misspelt."""
TERMS = ("ablat", "activation", "hidden_state", "interven", "lens", "probe", "residual")
"""So is an unknown field of a request, which no plug-in reads, with one of these."""

_VECTORS = '{"post_block": {"3": [...]}}'
_CLAMPS = '{"post_block": {"3": [{"vector": [...], "max": 1.0}]}}'
OBJECTS = {
    "capture": '{"inline": {"hooks": {"post_block": [3]}}}',
    "readouts": '{"lens": {"kind": "lens", "layers": "all"}}',
    "steering_vectors": _VECTORS,
    "prefill_steering_vectors": _VECTORS,
    "decode_steering_vectors": _VECTORS,
    "steering_clamps": _CLAMPS,
    "prefill_steering_clamps": _CLAMPS,
    "decode_steering_clamps": _CLAMPS,
    "patch_vectors": '{"dtype": "float32", "shape": [1, 2048], "data": "..."}',
}
"""By name of a field that holds an object: an example."""

_UNREAD = {
    "extra_body": "extra_body is a parameter of OpenAI's client, which puts its keys "
    "at the top level",
    "sampling_params": "this request has no sampling_params",
}
"""Fields that a request may lack, in which clients nest ours: why they are not read."""

OPENAI: frozenset[str] = frozenset(
    completion_create_params.CompletionCreateParamsBase.__annotations__.keys()
    | chat.completion_create_params.CompletionCreateParamsBase.__annotations__.keys()
    | {"early_stopping"}
)
"""Fields of OpenAI's API, which its client sends whether a server knows them or not,
and one that upstream adds to each conversation of a batch."""

ARGS = ("vllm_xargs", "extra_args")
"""Fields that hold arguments for extensions."""


def refuse_unsupported(model_class: Any, data: Any) -> None:
    """Reject fields that this kind of request would ignore.

    Args:
        model_class: the pydantic class of the request.
        data: the request's body; anything but a mapping is accepted.

    Raises:
        CaptureValidationError: the named field is not supported.
        SteeringValidationError: the named field is not supported.

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
    for name in sorted(OBJECTS.keys() & data.keys()):
        _refuse_other_kinds(name, data[name])
    for name in ARGS:
        refuse_args(data.get(name), name)
    unknown = data.keys() - known
    refuse_unknown(unknown, known & set(FIELDS))
    _refuse_beside_ours(unknown - OPENAI, data)
    _refuse_nested(model_class, data)
    _refuse_shared_request_id(data)


def refuse_unknown(
    names: Iterable[Any], known: Collection[str], inside: str = ""
) -> None:
    """Reject unknown names that are misspelt or belong to another system.

    Args:
        names: unknown fields or keys; unrelated ones are accepted.
        known: the supported names, for a suggestion.
        inside: the field that contains them, if any.

    Raises:
        CaptureValidationError: the message has the name and what to use instead.
        SteeringValidationError: the message has the name and what to use instead.

    """
    texts = sorted(one for one in names if isinstance(one, str))
    for number, name in enumerate(texts):
        remedy = FOREIGN.get(name)
        words = WORDS if inside else (*WORDS, *TERMS)
        known_meaning = remedy is not None or _has_word(name, words)
        if not known_meaning and not (number < MOST_COMPARED and _is_close(name)):
            continue
        shown = name if len(name) <= 60 else name[:57] + "..."
        where = f"{inside}.{shown}" if inside else shown
        raise _error(
            where,
            f"{where}: there is no such field, and nothing is ignored; "
            f"{remedy or _meant(name, known)}",
        )


def _refuse_beside_ours(unknown: Iterable[Any], data: Mapping[str, Any]) -> None:
    """Reject every unknown field of a request that captures, reads or steers.

    In other requests upstream ignores them, as clients of many servers rely on.
    """
    names = sorted(map(str, unknown))
    ours = next((name for name in FIELDS if data.get(name) is not None), None)
    if names and ours is not None:
        shown = names[0][:60]
        raise _error(
            shown,
            f"{shown}: there is no such field, and beside {ours} nothing is ignored; "
            "leave it out",
        )


def _refuse_other_kinds(name: str, value: Any) -> None:
    """Reject what is no object with an example; upstream's message has none."""
    if value is None or isinstance(value, Mapping):
        return
    remedy = f"it must be an object, such as {OBJECTS[name]}"
    if isinstance(value, str) and "vectors" in name:
        remedy += "; the name of a module is given as steering_name"
    raise _error(name, f"{name}: {remedy}", value)


def _has_word(name: str, words: Sequence[str]) -> bool:
    lower = name.lower()[:60]
    return any(word in lower for word in words)


def _is_close(name: str) -> bool:
    """Whether an unknown field is probably one of ours, with a few letters wrong."""
    return bool(difflib.get_close_matches(name.lower()[:60], _DISTINCT, 1, cutoff=0.8))


def refuse_args(args: Any, inside: str = "extra_args") -> None:
    """Reject unsupported keys of `vllm_xargs` or `extra_args`.

    Raises:
        CaptureValidationError: the named key is not supported.
        SteeringValidationError: the named key is not supported.

    """
    if not isinstance(args, Mapping):
        return
    for name in FIELDS:
        if name in args and name not in HONOURED_ARGS:
            raise _error(
                f"{inside}.{name}",
                f"{inside}.{name}: it is a separate field; put it next to {inside}",
            )
    known = {*FIELDS, *HONOURED_ARGS}
    refuse_unknown(args.keys() - HONOURED_ARGS, known, inside)


def check_body(model_class: Any, data: Any) -> None:
    """As `refuse_unsupported`, for use in a pydantic validator.

    Pydantic would wrap a `ValueError` in a `ValidationError`; a plain
    `VLLMValidationError` reaches the HTTP error handler unchanged.

    Raises:
        VLLMValidationError: the named field is not supported.

    """
    try:
        refuse_unsupported(model_class, data)
    except (CaptureValidationError, SteeringValidationError) as error:
        raise VLLMValidationError(
            error.args[0], parameter=error.parameter, value=error.value
        ) from None


def refusing() -> Any:
    """A pydantic validator for request classes that do not share a base class."""

    def check(cls: Any, data: Any) -> Any:
        check_body(cls, data)
        return data

    return model_validator(mode="before")(check)


def _names_of(model_class: Any) -> set[str]:
    """The names and aliases of a request class's fields."""
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
    """A hint at what a misspelt name probably means."""
    lower = name.lower()[:60]
    close = difflib.get_close_matches(lower, sorted(known), n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]}?"
    if known:
        return f"the fields are {sorted(known)}"
    return "leave it out: this request can neither be captured nor steered"


def _refuse_nested(model_class: Any, data: Mapping[str, Any]) -> None:
    """Reject fields that are nested one level too deep, where they are not read."""
    params = data.get("sampling_params")
    if "sampling_params" in model_class.model_fields and isinstance(params, Mapping):
        known = set(SamplingParams.__struct_fields__)
        refuse_unknown(params.keys() - known, FIELDS, "sampling_params")
        refuse_args(params.get("extra_args"), "sampling_params.extra_args")
    for inside, why in _UNREAD.items():
        nested = data.get(inside)
        if inside in model_class.model_fields or not isinstance(nested, Mapping):
            continue
        for name in sorted(set(map(str, nested)) & {*FIELDS, *FOREIGN}):
            where = f"{inside}.{name}"
            raise _error(where, f"{where}: {why}; put the field at the top level")
        refuse_unknown(nested.keys(), FIELDS, inside)


def _refuse_shared_request_id(data: Mapping[str, Any]) -> None:
    """Reject one `request_id` for several prompts: their rows would be overwritten."""
    prompts, capture = data.get("prompt"), data.get("capture")
    if not isinstance(prompts, list) or len(prompts) < 2:
        return
    if isinstance(prompts[0], int) or not isinstance(capture, Mapping):
        return  # One prompt, given as token ids.
    for name, spec in capture.items():
        if isinstance(spec, Mapping) and spec.get("request_id") is not None:
            where = f"capture.{str(name)[:60]}.request_id"
            raise CaptureValidationError(
                f"{where}: {len(prompts)} prompts cannot share one; leave it out (each "
                "prompt then has its own id), or send one request per prompt",
                parameter=where,
                value=str(spec["request_id"])[:60],
            )


def _error(name: str, message: str, value: Any = None) -> VLLMValidationError:
    words = ("capture", "readout", "residual_stream", "stop_when")
    captures = any(word in name for word in words)
    kind = CaptureValidationError if captures else SteeringValidationError
    return kind(message, parameter=name, value=value)
