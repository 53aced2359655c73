# SPDX-License-Identifier: Apache-2.0
"""Optional capabilities of consumers and sinks, resolved once into frozen records.

A consumer declares them by optional attributes and methods. They are probed only here,
when the consumer is registered; all other code reads these records.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

import torch

from vllm.v1.capture.groups import GroupSink, OnGroup
from vllm.v1.capture.sink import RowEncoder
from vllm.v1.capture.types import (
    CaptureChunk,
    CaptureFinalize,
    CaptureKey,
    CaptureResult,
)

EncoderOf: TypeAlias = Callable[[int, torch.dtype, torch.device], RowEncoder | None]
"""`encoder_of(width, dtype, device)`: encodes rows `[n, width]` on the device."""

PlacesOf: TypeAlias = Callable[[Any, str, int], Sequence[str]]
"""`places_of(raw, request_id, num_samples)`: the paths a request's rows go to.

`raw` is the request's spec for the consumer, `request_id` the client's id.
"""


@dataclass(frozen=True, slots=True)
class ConsumerCapabilities:
    """Optional features of a consumer at admission and for results."""

    takes_requests: bool
    """`reads_client_spec`: requests may name it in `SamplingParams.capture`."""
    told: Callable[[Any, Any], object] | None
    """`validate_client_spec`, if the instance that receives the rows must also be told
    the request's spec."""
    waits: bool
    """A request that names it always waits for its results."""
    streams: bool
    """Intermediate outputs carry the rows computed so far."""
    takes_readouts: bool
    """A request's spec may have `readouts`, whose results it takes as further keys."""
    max_inflight_bytes: int | None
    """Upper bound, over all requests in flight, on the bytes of rows in their results.

    None means no bound.
    """
    folder: Path | None
    """The directory it writes to; no two instances may share one."""
    global_spec: Callable[[], Any] | None
    """`global_capture_spec`: what it captures of every request."""
    metrics_key: str
    """If set, its payload is also in `RequestOutput.metrics.extras` under this key."""
    places_of: PlacesOf | None
    """None if its requests have no output paths that must be kept apart."""


@dataclass(frozen=True, slots=True)
class SinkCapabilities:
    """Optional methods and attributes of a sink, described at `CaptureSink`.

    A method that the sink does not define is None.
    """

    truncates: bool = False
    batches_steps: bool = False
    max_call_seconds: float = 0.0
    submit_chunk_batch: Callable[[Sequence[CaptureChunk]], object] | None = None
    submit_request_end: Callable[[str, Sequence[CaptureFinalize]], object] | None = None
    when_done: Callable[[str, Callable[[], None]], object] | None = None
    wait_for_result: Callable[[CaptureKey, float], CaptureResult | None] | None = None
    rewritten_bytes: Callable[[], int] | None = None
    row_encoder: EncoderOf | None = None
    groups: GroupSink | None = None
    """The sink itself, if it takes the rows of whole groups of keys."""


@dataclass(frozen=True, slots=True)
class StepCapabilities:
    """Optional methods of a consumer that runs within each step.

    One that it does not define does nothing.
    """

    warmup: Callable[[torch.device, torch.dtype], object]
    end_requests: Callable[[Sequence[str]], object]
    status: Callable[[], Mapping[str, Any]]
    shutdown: Callable[[], object]


def consumer_capabilities(consumer: Any) -> ConsumerCapabilities:
    """Probe the optional attributes of a consumer instance."""
    takes_requests = bool(getattr(consumer, "reads_client_spec", False))
    folder = getattr(consumer, "folder", None)
    places_of: PlacesOf | None = getattr(consumer, "claimed_places", None)
    if places_of is None and getattr(consumer, "claims_request_id", False):
        places_of = _places_as_named
    return ConsumerCapabilities(
        takes_requests=takes_requests,
        told=getattr(consumer, "validate_client_spec", None)
        if takes_requests and getattr(consumer, "remembers_specs", True)
        else None,
        waits=bool(getattr(consumer, "waits", False)),
        streams=bool(getattr(consumer, "streams", False)),
        takes_readouts=takes_requests
        and bool(getattr(consumer, "takes_readouts", False)),
        max_inflight_bytes=getattr(consumer, "max_inflight_bytes", None),
        folder=None if folder is None else Path(folder),
        global_spec=getattr(consumer, "global_capture_spec", None),
        metrics_key=str(getattr(consumer, "metrics_key", "")),
        places_of=places_of,
    )


def capabilities_of(consumers: Mapping[str, Any]) -> dict[str, ConsumerCapabilities]:
    """Map `consumer_capabilities` over instances, keyed by instance name."""
    return {name: consumer_capabilities(one) for name, one in consumers.items()}


def sink_capabilities(sink: Any) -> SinkCapabilities:
    """Probe the optional attributes of a sink."""
    known: Any = fields(SinkCapabilities)
    found = {one.name: getattr(sink, one.name, one.default) for one in known}
    found["groups"] = sink if isinstance(sink, GroupSink) else None
    return SinkCapabilities(**found)


def row_encoder(
    takers: Sequence[SinkCapabilities],
    width: int,
    dtype: torch.dtype,
    device: torch.device,
) -> RowEncoder | None:
    """The encoder of a worker's only consumer, if it has one and there is a GPU.

    On a CPU no row is copied to the host, and encoding whole sequences at their end is
    faster than encoding the rows of each step.

    Args:
        takers: the consumers that take rows.
        width: values per row.
        dtype: of the rows.
        device: the device of the model.

    """
    if not crosses_to_host(device) or len(takers) != 1:
        return None
    encoder_of = takers[0].row_encoder
    return None if encoder_of is None else encoder_of(width, dtype, device)


def crosses_to_host(device: torch.device) -> bool:
    """Whether rows are computed in other memory than the host's."""
    return device.type != "cpu"


def step_capabilities(consumer: Any) -> StepCapabilities:
    """Probe the optional methods of a consumer that runs within each step."""

    def method(name: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(consumer, name, None) or (lambda *_: {})
        return found

    return StepCapabilities(
        warmup=method("warmup"),
        end_requests=method("end_requests"),
        status=method("status"),
        shutdown=method("shutdown"),
    )


def truncates(thing: Any) -> bool:
    """Whether a sink (or its class) accepts rows that may later be discarded."""
    return bool(getattr(thing, "truncates", False))


def group_method(consumer: Any) -> OnGroup | None:
    """The method `on_group` of a consumer that has one for its `on_capture`.

    A class that inherits it and has an `on_capture` of its own does not use it.
    """
    for kind in type(consumer).__mro__:
        if "on_group" in vars(kind):
            method: OnGroup = consumer.on_group
            return method
        if "on_capture" in vars(kind):
            break
    return None


def runs_in_steps(thing: Any) -> bool:
    """Whether a consumer asks to be called within each step.

    `SyncCaptureConsumer` does; no base class is needed.
    """
    return getattr(thing, "execution", "async") == "sync"


def name_of(instance: Any) -> str:
    """The `instance_name` of a ready instance, or the name of its class."""
    return str(getattr(instance, "instance_name", "") or type(instance).__name__)


def has_own_name(instance: Any) -> bool:
    """Whether a ready instance says what it is called."""
    return bool(getattr(instance, "instance_name", ""))


def _places_as_named(raw: Any, request_id: str, num_samples: int) -> list[str]:
    """The path `tag/request_id` of a spec that sets `request_id`."""
    if not isinstance(raw, Mapping) or raw.get("request_id") is None:
        return []
    return [f"{raw.get('tag') or ''}/{raw['request_id']}"]
