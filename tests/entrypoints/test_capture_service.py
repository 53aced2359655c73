# SPDX-License-Identifier: Apache-2.0
"""Status and metrics of captures on a server, and clients that disconnect."""

import http.client
import json
import re
from pathlib import Path
from time import sleep
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.server import SHORT, Server
from tests.support.waiting import until
from vllm.v1.capture.consumers.filesystem import read_request

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPT = [20, 30, 40, 50, 60, 70]


def request(name: str, **more: Any) -> dict[str, Any]:
    spec = {"request_id": name, "tag": "service", "hooks": {"post_block": "all"}}
    capture = {"filesystem": spec | {"positions": "all"}}
    return {**SHORT, "prompt": PROMPT, "capture": capture, "capture_wait": True, **more}


def metrics(server: Server) -> dict[tuple[str, str], float]:
    """The metrics of capture, by name and consumer."""
    text = server.get("/metrics").body
    pattern = r'^vllm:capture_(\w+)\{(?:consumer="(\w+)",)?engine="0",model_name="tiny"'
    pattern += r'(?:,le="\+Inf")?\} (\S+)$'
    found = re.findall(pattern, text.replace('",le="+Inf"', '"'), re.MULTILINE)
    return {(name, consumer): float(value) for name, consumer, value in found}


def counters(server: Server) -> Any:
    return server.get("/v1/capture").body["counters"]


def test_metrics_grow_with_what_is_captured(capture_server: Server) -> None:
    # All earlier requests are reported once the counters stop changing.
    before = metrics(capture_server)
    sleep(1.5)
    while (now := metrics(capture_server)) != before:
        before = now
        sleep(1.5)
    for number in range(2):
        reply = capture_server.post("/v1/completions", request(f"metrics-{number}"))
        assert reply.status == 200
    rows = ("rows_total", "filesystem")
    until(lambda: metrics(capture_server)[rows] > before[rows])
    sleep(1.5)
    after = metrics(capture_server)

    def grown(name: str, consumer: str = "filesystem") -> float:
        return after[name, consumer] - before[name, consumer]

    assert grown("rows_total") == 2 * 3 * 10
    assert grown("bytes_total") == 2 * 3 * 10 * 64 * 4
    assert grown("requests_total") == grown("finalize_seconds_count") == 2
    assert grown("finalize_seconds_sum") > 0
    assert grown("rows_total", "logging") == 2 * 2
    assert grown("rows_total", "inline") == 0
    for name in ("dropped_rows_total", "spilled_rows_total", "failed_rows_total"):
        assert grown(name) == 0
    assert after["queue_depth", "filesystem"] == 0
    assert after["queue_bytes", "filesystem"] == 0
    assert after["spill_bytes", "filesystem"] == 0
    assert ("reforwarded_tokens_total", "") in after


def test_the_server_tells_its_consumers_limits_and_counters(
    capture_server: Server,
) -> None:
    status, reply = capture_server.get("/v1/capture")
    assert status == 200
    assert {entry["name"]: entry for entry in reply["consumers"]} == {
        name: {
            "name": name,
            "location": "driver" if name == "memory" else "worker",
            "takes_requests": True,
            "captures_every_request": name == "logging",
        }
        for name in ("filesystem", "inline", "logging", "memory")
    }
    assert reply["limits"]["overload_policy"] == "block"
    assert reply["limits"]["rows_per_step"] == 2**28 // (64 * 4) // 2
    assert reply["limits"]["max_inflight_bytes"]["inline"] >= 2**28
    assert reply["hook_points"]["2"] == ["pre_attn", "post_attn", "post_block"]
    assert "root" not in json.dumps(reply), "paths are nobody's business"


def test_the_log_tells_the_budget_once(capture_server: Server) -> None:
    lines = capture_server.log.read_text().splitlines()
    (line,) = [line for line in lines if "Residual stream:" in line]
    assert "capture by ['filesystem', 'inline', 'logging', 'memory']" in line
    assert "rows a step in 256 MiB of staging memory" in line
    assert "1024 packets of rows with 256 MiB may wait, then block" in line


def written(server: Server) -> int:
    """Requests of `filesystem`; a server reports none before its first capture."""
    told = counters(server)["consumers"].get("filesystem", {"requests": 0})
    return int(told["requests"])


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_capture(
    capture_server: Server, capture_root: Path, stream: bool
) -> None:
    name = f"gone-{stream}"
    seen = written(capture_server)
    connection = http.client.HTTPConnection(urlsplit(capture_server.url).netloc)
    body = request(name, max_tokens=240, stream=stream)
    body["capture"]["filesystem"]["positions"] = "all_prompt"
    connection.request(
        "POST",
        "/v1/completions",
        json.dumps(body),
        {"Content-Type": "application/json"},
    )
    if stream:
        assert connection.getresponse().readline()
    else:
        until(lambda: counters(capture_server)["requests_in_flight"] > 0)
    connection.close()
    until(lambda: counters(capture_server)["requests_in_flight"] == 0)
    until(lambda: written(capture_server) > seen)
    # The prompt was computed, so its rows are complete, whether or not a client waits.
    rows = read_request(capture_root, "service", name)
    assert [tuple(each.shape) for each in rows.values()] == [(6, 64)] * 3
    after = capture_server.post("/v1/completions", request(f"{name}-after"))
    assert after.body["capture_results"]["filesystem"]["status"] == "ok"
