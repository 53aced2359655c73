# SPDX-License-Identifier: Apache-2.0
"""Consumers in the front end's process (`location = "driver"`), and their inboxes."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from vllm.v1.capture.capabilities import consumer_capabilities
from vllm.v1.capture.delivery.consumer_thread import SHUTDOWN_GRACE, SinkLane
from vllm.v1.capture.delivery.packet_queue import Ending
from vllm.v1.capture.registry import as_sink
from vllm.v1.capture.results import GroupedRows
from vllm.v1.capture.stats import LaneCounters
from vllm.v1.capture.transport.addresses import rows_address, with_rows
from vllm.v1.capture.transport.zmq_channel import (
    ChunksMessage,
    EndMessage,
    Inbox,
    Message,
)
from vllm.v1.capture.types import (
    CaptureContext,
    CaptureResult,
    VllmInternalRequestId,
)

if TYPE_CHECKING:
    from vllm.config.capture import CaptureConfig

Note = Callable[[str, str, int, CaptureResult], None]
"""`note(request id, instance, stage, result)`."""


class DriverLanes:
    """One lane (a thread with a queue) and one address per driver-side instance.

    A full lane stops reading from its address. Then the workers' side of the connection
    fills up, where the overload policy applies. Other instances are not delayed, and
    neither are results, which are sent to the front end's own address.
    """

    def __init__(
        self,
        config: "CaptureConfig",
        consumers: Mapping[str, Any],
        address: str,
        note: Note,
        host: str | None = None,
    ) -> None:
        """Start listening for rows.

        Args:
            config: has the bounds of the queues.
            consumers: all instances by name; those in workers are skipped.
            address: the front end's own address, from which the others are derived.
            note: called with each result.
            host: as for `Inbox`.

        """
        self._note = note
        self._lanes = {
            name: SinkLane(
                name,
                as_sink(consumer),
                config.dispatch_queue_bytes,
                config.dispatch_queue_size,
                validate=consumer_capabilities(consumer).told,
            )
            for name, consumer in consumers.items()
            if consumer.location == "driver"
        }
        self._inboxes = []
        self.address = address
        """The front end's address, with those of the instances here."""
        for name, lane in self._lanes.items():
            inbox = Inbox(
                self._receive,
                rows_address(address, name),
                bounded=True,
                idle=lane.check,
                host=host,
            )
            self._inboxes.append(inbox)
            self.address = with_rows(self.address, name, inbox.address)

    def open(
        self,
        request_id: str,
        specs: Mapping[str, Any],
        context: Callable[[], CaptureContext],
    ) -> None:
        """Announce a sample to the consumers here.

        Args:
            request_id: the sample's internal id.
            specs: `SamplingParams.capture`, by instance.
            context: returns the facts about the sample.

        """
        for name in specs.keys() & self._lanes.keys():
            self._lanes[name].open(request_id, specs[name], context)

    def counters(self) -> dict[str, LaneCounters]:
        """The counters of the lanes in this process, by instance."""
        return {name: lane.counters() for name, lane in self._lanes.items()}

    def close(self, timeout: float) -> None:
        """Stop listening and shut the consumers down in parallel.

        Args:
            timeout: seconds to finish queued work; a consumer that hangs is abandoned
                after that.

        """
        for inbox in self._inboxes:
            inbox.close()
        deadline = monotonic() + timeout
        closing = [
            threading.Thread(target=lane.close, args=(timeout,), daemon=True)
            for lane in self._lanes.values()
        ]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(max(deadline - monotonic(), 0.0) + 2 * SHUTDOWN_GRACE)

    def _receive(self, message: Message) -> None:
        if isinstance(message, ChunksMessage):
            self._lanes[message.instance].submit(message.chunks)
        else:
            assert isinstance(message, EndMessage), "results have another address"
            self._end(message)

    def _end(self, message: EndMessage) -> None:
        request_id = VllmInternalRequestId(message.request_id)
        ending = Ending(request_id, tuple(message.ends), partial(self._answer, message))
        self._lanes[message.instance].finish(ending)

    def _answer(self, message: EndMessage, result: CaptureResult) -> None:
        if isinstance(result.payload, GroupedRows):
            result = replace(result, payload=result.payload.by_tap())
        self._note(message.request_id, message.instance, message.stage, result)
