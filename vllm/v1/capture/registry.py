# SPDX-License-Identifier: Apache-2.0
"""Finds, checks and builds consumers: entry-point names to classes to instances."""

from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import entry_points
from inspect import isabstract
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.capture.capabilities import ConsumerCapabilities, runs_in_steps
from vllm.v1.capture.consumer import BatchingSink, CaptureConsumer
from vllm.v1.capture.errors import (
    CaptureValidationError,
    UnknownCaptureConsumerError,
)
from vllm.v1.capture.sink import CaptureSink

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.capture import ConsumerConfig

ENTRY_POINT_GROUP = "vllm.capture_consumers"

REQUIRABLE_FIELDS = frozenset(
    {
        "client_request_id",
        "client_spec",
        "dtype",
        "finish_reason",
        "hidden_size",
        "hook",
        "layer",
        "layer_convention",
        "model",
        "num_generated_tokens",
        "num_prompt_tokens",
        "num_rows",
        "num_samples",
        "pipeline_parallel_rank",
        "pipeline_parallel_size",
        "positions",
        "sample_index",
        "token_ids",
        "vllm_internal_request_id",
    }
)
"""The fields that every sidecar has, which a consumer may require."""

SIDECAR_FIELDS = REQUIRABLE_FIELDS.union(
    {
        "after",
        "capture_error",
        "capture_note",
        "dropped_rows",
        "fired",
        "heads",
        "readout",
    }
)
"""All fields that a sidecar may have."""


def consumer_names() -> list[str]:
    """The names of all installed consumers."""
    return sorted({entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)})


def consumer_class(name: str) -> type[Any]:
    """Load the class of the entry point `name` in the group `vllm.capture_consumers`.

    Raises:
        UnknownCaptureConsumerError: no installed package defines this name.
        CaptureValidationError: several packages define it, it cannot be imported, or
            it is not a consumer.

    """
    found = {
        entry.value: entry
        for entry in entry_points(group=ENTRY_POINT_GROUP)
        if entry.name == name
    }
    if not found:
        raise UnknownCaptureConsumerError(
            f"capture consumer {name!r} is not installed; installed are "
            f"{consumer_names()}. A package adds one with an entry point in the "
            f"group {ENTRY_POINT_GROUP!r}",
            parameter="capture_consumers",
            value=name,
        )
    if len(found) > 1:
        raise CaptureValidationError(
            f"capture consumer {name!r} is defined by several packages "
            f"({sorted(found)}); uninstall all but one",
            parameter="capture_consumers",
            value=name,
        )
    (entry,) = found.values()
    try:
        loaded = entry.load()
    except Exception as error:
        raise CaptureValidationError(
            f"capture consumer {name!r} ({entry.value}) cannot be imported: "
            f"{type(error).__name__}: {error}",
            parameter="capture_consumers",
            value=name,
        ) from error
    check_consumer(loaded, name)
    return loaded


def check_consumer(thing: Any, name: str) -> None:
    """Check that a class or an instance is a valid consumer or sink.

    Raises:
        CaptureValidationError: it is not; the message says why.

    """
    kind = thing if isinstance(thing, type) else type(thing)
    location = getattr(thing, "location", None)
    problem = None
    required = frozenset(getattr(thing, "required_sidecar_fields", ()))
    if unknown := required - REQUIRABLE_FIELDS:
        problem = (
            f"it requires the sidecar fields {sorted(unknown)}, which requests do not "
            f"always have; they have {sorted(REQUIRABLE_FIELDS)}"
        )
    if runs_in_steps(kind):
        problem = problem or _problem_in_steps(thing)
    elif callable(getattr(kind, "on_step", None)):
        problem = (
            "it defines on_step, which is called within each step only of a class "
            'with execution = "sync", such as one derived from SyncCaptureConsumer'
        )
    elif issubclass(kind, CaptureConsumer):
        if isabstract(kind):
            problem = "it does not define on_capture"
    else:
        missing = [
            method
            for method in ("submit_chunk", "submit_finalize", "get_result", "shutdown")
            if not callable(getattr(thing, method, None))
        ]
        if missing:
            problem = (
                f"{kind.__name__} is neither a CaptureConsumer nor a CaptureSink (it "
                f"has no {', '.join(missing)})"
            )
    if problem is None and location not in ("worker", "driver"):
        problem = f'its location is {location!r}, not "worker" or "driver"'
    if problem is not None:
        raise CaptureValidationError(
            f"capture consumer {name!r}: {problem}",
            parameter="capture_consumers",
            value=name,
        )


def _problem_in_steps(thing: Any) -> str | None:
    """Why a class or an instance cannot run within each step; None if it can."""
    if not isinstance(thing, type):
        return (
            'it is to run within each step (execution = "sync"): name its entry '
            "point, as a ready instance lives in another process than the worker"
        )
    needed = ("global_capture_spec", "on_step", "decide")
    undefined: frozenset[str] = getattr(thing, "__abstractmethods__", frozenset())
    missing = [
        name
        for name in needed
        if name in undefined
        or (name != "decide" and not callable(getattr(thing, name, None)))
    ]
    if missing:
        return f"it runs within each step and leaves {', '.join(missing)} undefined"
    return None


def build_consumer(entry: "ConsumerConfig", vllm_config: "VllmConfig") -> Any:
    """Create the consumer instance of one entry of the configuration.

    Raises:
        CaptureValidationError: the consumer rejects its parameters, with the instance's
            name and the consumer's message, or sets another location than its class.

    """
    kind = consumer_class(entry.name)
    try:
        consumer = kind(vllm_config, dict(entry.params))
    except Exception as error:
        raise _rejected(entry, error) from error
    if consumer.location != kind.location:
        raise CaptureValidationError(
            f"capture consumer {entry.instance_name!r}: its class has the location "
            f"{kind.location!r} and the instance {consumer.location!r}; the class "
            "decides, so give each location a class",
            parameter="capture_consumers",
            value=entry.instance_name,
        )
    with suppress(AttributeError):  # A class with slots may not have this attribute.
        consumer.instance_name = entry.instance_name
    return consumer


def check_params(entry: "ConsumerConfig") -> None:
    """Let a consumer's class check its parameters, before the model is loaded.

    Raises:
        CaptureValidationError: as of `build_consumer`.

    """
    check = getattr(consumer_class(entry.name), "check_params", None)
    try:
        if check is not None:
            check(dict(entry.params))
    except Exception as error:
        raise _rejected(entry, error) from error


def _rejected(entry: "ConsumerConfig", error: Exception) -> CaptureValidationError:
    return CaptureValidationError(
        f"capture consumer {entry.instance_name!r} rejects its parameters "
        f"{dict(entry.params)}: {error}",
        parameter="capture_consumers",
        value=entry.instance_name,
    )


def check_folders(consumers: Mapping[str, ConsumerCapabilities]) -> None:
    """Refuse two instances that write to the same directory.

    Args:
        consumers: the capabilities by instance name.

    Raises:
        CaptureValidationError: two have the same `folder`.

    """
    owners: dict[Path, str] = {}
    for name, can in consumers.items():
        folder = can.folder
        if folder is None:
            continue
        other = owners.setdefault(folder.resolve(), name)
        if other != name:
            raise CaptureValidationError(
                f"the capture consumers {other!r} and {name!r} both write to "
                f"{str(folder)!r}; give one of them another root",
                parameter="capture_consumers",
                value=name,
            )


def as_sink(consumer: Any) -> CaptureSink:
    """`consumer` if it is a sink itself, otherwise a `BatchingSink` around it."""
    is_sink = hasattr(consumer, "submit_chunk")
    sink: CaptureSink = consumer if is_sink else BatchingSink(consumer)
    return sink
