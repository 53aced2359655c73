# SPDX-License-Identifier: Apache-2.0
"""Blocks are cleared from the first request on that can make its stream overflow."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm.v1.residual.changed_streams import ChangedStreams


def request(steered: bool = False, embedded: bool = False) -> Any:
    params = SimpleNamespace(_steering=object() if steered else None, _hooks=None)
    embeds = object() if embedded else None
    return SimpleNamespace(request_id="r", sampling_params=params, prompt_embeds=embeds)


@pytest.mark.parametrize(
    ("started", "for_all"),
    [
        (request(steered=True), False),
        (request(embedded=True), False),
        (request(), True),
    ],
)
def test_blocks_are_cleared_also_after_the_request_has_ended(
    started: Any, for_all: bool
) -> None:
    streams = ChangedStreams(clears=False)
    streams.begin(started, for_all)
    assert streams.clears and streams.any_running and streams.concerns(started)
    streams.end(started)
    assert streams.clears and not streams.any_running and not streams.concerns(started)


def test_global_vectors_mark_requests_that_run_already() -> None:
    streams, running = ChangedStreams(clears=False), request()
    streams.begin(running, for_all=False)
    assert not streams.concerns(running)
    streams.begin_all([])
    assert not streams.clears, "nobody was steered"
    streams.begin_all([running])
    assert streams.clears and streams.concerns(running)


def test_blocks_of_unsteered_traffic_are_never_cleared() -> None:
    streams = ChangedStreams(clears=False)
    streams.begin(request(), for_all=False)
    streams.end(request())
    assert not streams.clears and not streams.any_running


def test_what_upstream_clears_anyway_is_cleared() -> None:
    assert ChangedStreams(clears=True).clears
