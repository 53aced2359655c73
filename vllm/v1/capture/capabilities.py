# SPDX-License-Identifier: Apache-2.0
"""What consumers and sinks can do beyond the minimum, read once.

A consumer says so by attributes and methods that it may leave out. They are looked for
here and nowhere else, when it is registered; the rest of capture reads these records.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from vllm.v1.capture.types import (
    CaptureChunk,
    CaptureFinalize,
    CaptureKey,
    CaptureResult,
)

PlacesOf: TypeAlias = Callable[[Any, str, int], Sequence[str]]
"""`places_of(raw, request_id, num_samples)`: where a request's rows are written."""


@dataclass(frozen=True, slots=True)
class ConsumerCapabilities:
    """What a consumer can do at admission and with the results of a request."""

    takes_requests: bool
    """`reads_client_spec`: a request may name it in `SamplingParams.capture`."""
    remembers_specs: bool
    """It must see the specs of the requests whose rows it gets."""
    waits: bool
    """A request that names it always waits for its results."""
    streams: bool
    """Outputs before the last carry the rows that have come by then."""
    truncates: bool
    """As of `SinkCapabilities`, for one that is a sink."""
    max_inflight_bytes: int | None
    """How many bytes of rows all requests together may bring back."""
    folder: Path | None
    """Where it writes files, which nobody else may do."""
    global_spec: Callable[[], Any] | None
    """`global_capture_spec`: what it captures of every request."""
    places_of: PlacesOf | None
    """None if requests have no places of their own there."""


@dataclass(frozen=True, slots=True)
class SinkCapabilities:
    """What a sink takes besides `submit_chunk` and `submit_finalize`; see its class."""

    truncates: bool
    batches_steps: bool
    max_call_seconds: float
    submit_chunk_batch: Callable[[Sequence[CaptureChunk]], object] | None
    submit_request_end: Callable[[str, Sequence[CaptureFinalize]], object] | None
    when_done: Callable[[str, Callable[[], None]], object] | None
    wait_for_result: Callable[[CaptureKey, float], CaptureResult | None] | None


def consumer_capabilities(consumer: Any) -> ConsumerCapabilities:
    """What an instance can do."""
    takes_requests = bool(getattr(consumer, "reads_client_spec", False))
    folder = getattr(consumer, "folder", None)
    places_of: PlacesOf | None = getattr(consumer, "claimed_places", None)
    if places_of is None and getattr(consumer, "claims_request_id", False):
        places_of = _places_as_named
    return ConsumerCapabilities(
        takes_requests=takes_requests,
        remembers_specs=takes_requests
        and bool(getattr(consumer, "remembers_specs", True))
        and callable(getattr(consumer, "validate_client_spec", None)),
        waits=bool(getattr(consumer, "waits", False)),
        streams=bool(getattr(consumer, "streams", False)),
        truncates=truncates(consumer),
        max_inflight_bytes=getattr(consumer, "max_inflight_bytes", None),
        folder=None if folder is None else Path(folder),
        global_spec=getattr(consumer, "global_capture_spec", None),
        places_of=places_of,
    )


def capabilities_of(consumers: Mapping[str, Any]) -> dict[str, ConsumerCapabilities]:
    """What each of several instances can do, by its name."""
    return {name: consumer_capabilities(one) for name, one in consumers.items()}


def sink_capabilities(sink: Any) -> SinkCapabilities:
    """What a sink takes."""
    return SinkCapabilities(
        truncates=truncates(sink),
        batches_steps=bool(getattr(sink, "batches_steps", False)),
        max_call_seconds=float(getattr(sink, "max_call_seconds", 0.0)),
        submit_chunk_batch=getattr(sink, "submit_chunk_batch", None),
        submit_request_end=getattr(sink, "submit_request_end", None),
        when_done=getattr(sink, "when_done", None),
        wait_for_result=getattr(sink, "wait_for_result", None),
    )


def truncates(thing: Any) -> bool:
    """Whether a sink or its class takes rows before it is known if they count."""
    return bool(getattr(thing, "truncates", False))


def is_sink(consumer: Any) -> bool:
    """Whether a consumer takes rows as they come, without `BatchingSink`."""
    return hasattr(consumer, "submit_chunk")


def name_of(instance: Any) -> str:
    """What a ready instance calls itself; its class's name if it says nothing."""
    return str(getattr(instance, "instance_name", "") or type(instance).__name__)


def _places_as_named(raw: Any, request_id: str, num_samples: int) -> list[str]:
    """The place that a spec names with `tag` and `request_id`."""
    if not isinstance(raw, Mapping) or raw.get("request_id") is None:
        return []
    return [f"{raw.get('tag') or ''}/{raw['request_id']}"]
