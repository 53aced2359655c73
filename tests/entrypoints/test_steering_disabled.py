# SPDX-License-Identifier: Apache-2.0
"""A server without --enable-steering refuses steering fields."""

from typing import Any

import pytest

from tests.support.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SPEC = {"post_block": {"0": [1.0] * 64}}
FIELDS: dict[str, Any] = {
    "steering_vectors": SPEC,
    "prefill_steering_vectors": SPEC,
    "decode_steering_vectors": SPEC,
    "steering_name": "calm",
    "steering_module_ref": [{"name": "calm"}],
}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [20, 30, 40]},
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/batch": {"messages": [CHAT["messages"]]},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_refused_with_the_remedy(
    capture_server: Server, path: str, name: str
) -> None:
    body = {"model": "tiny", "max_tokens": 2, **BODIES[path], name: FIELDS[name]}
    refused = capture_server.post(path, body)
    assert refused.status == 400, refused
    message = refused.body["error"]["message"]
    assert name in message and "--enable-steering" in message
    assert refused.body["error"]["param"] == name


def test_a_stream_holds_nothing_but_the_refusal(capture_server: Server) -> None:
    # Upstream starts a stream before it checks a request, so the status is 200.
    body = {"model": "tiny", "prompt": [20, 30], "steering_name": "calm"}
    (only,) = capture_server.stream("/v1/completions", body)
    assert only["error"]["code"] == 400 and only["error"]["param"] == "steering_name"
    assert "--enable-steering" in only["error"]["message"]
