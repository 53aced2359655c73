# SPDX-License-Identifier: Apache-2.0
"""Rows that are kept on the server and read over HTTP."""

import urllib.request
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from tests.support.server import SHORT, Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

URL = "/v1/capture/memory"


def completion(server: Server, prompt: list[int], **spec: Any) -> Any:
    asked = {"hooks": {"post_block": [0, 2]}, "positions": "all"}
    capture = {"memory": asked | spec, "inline": asked}
    body = {**SHORT, "prompt": prompt, "capture": capture, "capture_wait": True}
    status, reply = server.post("/v1/completions", body)
    assert status == 200, reply
    return reply["capture_results"]


def test_rows_are_fetched_whole_in_parts_and_once(capture_server: Server) -> None:
    found = [
        completion(capture_server, [20 + i, 30, 40, 50], name="kept") for i in range(2)
    ]
    assert found[0]["memory"]["payload"] == {"name": "kept"}
    status, listed = capture_server.get(URL)
    assert status == 200 and listed["names"]["kept"]["requests"] == 2
    assert listed["held_bytes"] == listed["names"]["kept"]["bytes"]

    whole = capture_server.get(f"{URL}/kept").body
    for one, results in zip(whole["requests"], found, strict=True):
        key = f"{one['request_id']}/{one['sample_index']}"
        assert whole["capture_results"][key]["payload"] == results["inline"]["payload"]

    part = f"{URL}/kept?layers=2&start=1&stop=3&request_id={one['request_id']}"
    ((result),) = capture_server.get(part).body["capture_results"].values()
    (tap,) = result["payload"]
    assert tap["layer"] == 2 and tap["positions"] == [1, 2]

    request = urllib.request.Request(
        f"{capture_server.url}{part}&drop=true",
        headers={"Accept": "application/safetensors"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        ((name, rows),) = load(reply.read()).items()
    assert name.endswith("2_post_block") and rows.shape[0] == 2
    assert np.isfinite(rows).all()
    assert capture_server.get(f"{URL}/kept").status == 404
    assert capture_server.get(URL).body["held_bytes"] == 0


def test_names_are_dropped_and_unknown_ones_are_listed(capture_server: Server) -> None:
    completion(capture_server, [1, 2, 3], name="gone")
    assert capture_server.delete(f"{URL}/gone").body["requests"] == 1
    status, reply = capture_server.get(f"{URL}/gone")
    assert status == 404 and "no rows are kept under this name" in str(reply)
    assert capture_server.get(f"{URL}?instance=inline").status == 404
    assert capture_server.get(f"{URL}/x?layers=a").status == 400
    for query in ("layer=2", "hook=post_blok", "layer=2&drop=true"):
        status, reply = capture_server.get(f"{URL}/x?{query}")
        assert status == 400 and query.split("=")[0] in str(reply)
