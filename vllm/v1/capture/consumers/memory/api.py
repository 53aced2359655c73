# SPDX-License-Identifier: Apache-2.0
"""Methods of `LLM` and `AsyncLLM` for the rows of the consumer `memory`."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from vllm.v1.capture.consumers.memory import MemoryConsumer
from vllm.v1.capture.consumers.memory.store import KeptRequest, RowStore
from vllm.v1.capture.errors import fail

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM
    from vllm.v1.capture.frontend.disabled import NoCapture
    from vllm.v1.engine.async_llm import AsyncLLM


def captured(
    self: "LLM", name: str | None = None, *, instance: str | None = None
) -> Any:
    """Read rows that the consumer `memory` keeps.

    Args:
        self: the engine.
        name: the name in the requests' specs; None for an overview.
        instance: name of the consumer instance; needed if several keep rows, and
            for the runs of `patch_source` beside `memory`.

    Returns:
        With a name, a list with one `KeptRequest` for each sample of each request:
        `request_id`, `sample_index`, `num_prompt_tokens` and `rows`, which maps
        `(layer, hook)` to a tensor `[rows, hidden_size]`. They stay until
        `drop_captured`. Without a name, `{"max_bytes", "held_bytes", "names"}`.

    Raises:
        CaptureValidationError: there is no such name or consumer.

    """
    return read(self.llm_engine.capture, name, instance)


def drop_captured(
    self: "LLM", name: str, *, instance: str | None = None
) -> dict[str, Any]:
    """Drop the rows of a name; tensors that were read remain valid.

    Returns:
        The number of `requests`, `rows` and `bytes` that were dropped.

    Raises:
        CaptureValidationError: there is no such name or consumer.

    """
    return drop(self.llm_engine.capture, name, instance)


async def async_captured(
    self: "AsyncLLM", name: str | None = None, *, instance: str | None = None
) -> Any:
    """As `LLM.captured`."""
    return read(self.capture, name, instance)


async def async_drop_captured(
    self: "AsyncLLM", name: str, *, instance: str | None = None
) -> dict[str, Any]:
    """As `LLM.drop_captured`."""
    return drop(self.capture, name, instance)


async def async_wait_for_capture_results(
    self: "AsyncLLM", request_id: str, timeout: float | None = 120.0
) -> dict[str, Any] | None:
    """Wait for results of a capture that were pending in the final output.

    Args:
        self: the engine.
        request_id: the id under which the request was submitted.
        timeout: seconds to wait at most; None waits as long as results may arrive.

    Returns:
        `{instance: CaptureResult}`, once: the engine then forgets them. None if none is
        pending, or they have not arrived in time.

    """
    return await self.capture.wait_for_results(request_id, timeout)


def read(
    capture: "NoCapture", name: str | None, instance: str | None = None
) -> dict[str, Any] | list[KeptRequest]:
    """The rows of a name, or an overview without one."""
    store = store_of(capture, instance)
    return store.describe() if name is None else store.get(name)


def drop(
    capture: "NoCapture", name: str, instance: str | None = None
) -> dict[str, Any]:
    """Drop the rows of a name."""
    return store_of(capture, instance).drop(name)


def store_of(capture: "NoCapture", instance: str | None = None) -> RowStore:
    """The store of a consumer `memory`.

    Raises:
        CaptureValidationError: there is none, or there are several and `instance`
            does not say which.

    """
    keeping = keepers(capture)
    if not keeping:
        raise fail(
            "captured: this engine keeps no rows; start it with --capture-consumers "
            "memory, or LLM(capture_consumers=['memory']) offline",
            "captured",
            instance,
        )
    if instance is None:  # Runs, which make room for others, only if nothing else is.
        meant = [one for one in keeping.values() if not one.evicts]
        if len(meant := meant or [*keeping.values()]) == 1:
            return meant[0].store
    if instance not in keeping:
        raise fail(f"instance must be one of {sorted(keeping)}", "instance", instance)
    return keeping[instance].store


def kept_run(capture: "NoCapture", name: str, where: str = "run") -> KeptRequest:
    """The only request of a name, which any consumer here keeps.

    Raises:
        CaptureValidationError: there is no such name, or it has several requests.

    """
    kept = [] if (store := store_with(capture, name)) is None else store.get(name)
    if len(kept) == 1:
        return kept[0]
    if kept:
        raise fail(
            f"{where}: a run is one request, and the name {name!r} has {len(kept)}; "
            "capture it alone, under another name",
            where,
            name,
        )
    stores = [keeper.store for keeper in keepers(capture).values()]
    why = "".join(dict.fromkeys(store.why_unknown(name) for store in stores))
    known = sorted(name for store in stores for name in store.describe()["names"])
    raise fail(
        f"{where}: no run is kept under the name {name!r}{why}, or it was evicted; "
        f"there are: {', '.join(known[:8]) or 'none'}. Capture it with the consumer "
        "patch_source (--enable-patching) or memory",
        where,
        name,
    )


def store_with(capture: "NoCapture", name: str) -> RowStore | None:
    """The store in which a name is kept, of any consumer here."""
    stores = (keeper.store for keeper in keepers(capture).values())
    return next((store for store in stores if name in store), None)


@contextmanager
def leased(capture: "NoCapture", name: str) -> Iterator[None]:
    """Keep a name from being evicted by any consumer here; it may be dropped."""
    with ExitStack() as leases:
        for keeper in keepers(capture).values():
            leases.enter_context(keeper.store.lease(name))
        yield


def keepers(capture: "NoCapture") -> dict[str, MemoryConsumer]:
    """The consumers that keep rows, by the names of their instances."""
    return {
        name: consumer
        for name, consumer in capture.consumers().items()
        if isinstance(consumer, MemoryConsumer)
    }
