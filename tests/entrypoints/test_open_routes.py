# SPDX-License-Identifier: Apache-2.0
"""Which routes of a server with a key answer without it."""

from fastapi.routing import APIRoute
from starlette.testclient import TestClient

from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

OPEN = {
    *("/health", "/load", "/metrics", "/ping", "/version", "/kv_event_sources"),
    *("/tokenize", "/detokenize"),
}
"""Routes that tell about the server and its tokenizer; docs/operate/security.md."""


def test_nothing_generates_captures_or_steers_without_the_servers_key() -> None:
    given = ["--api-key", "k", "--steering-api-key", "s", "--enable-steering"]
    given += ["--capture-consumers", "inline", "--enable-readouts"]
    given += ["--interp-engine-api", "--vllm-lens-api"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(given)
    app = build_app(args, ("generate",))
    app.state.args = args
    client = TestClient(app, raise_server_exceptions=False)
    found, asked = set(), 0
    for route in app.routes:
        if not isinstance(route, APIRoute):
            continue  # The description of the routes.
        path = route.path.replace("{", "").replace("}", "")
        for method in route.methods:
            asked += 1
            if client.request(method, path, json={}).status_code != 401:
                found.add(route.path)
    assert asked > 40
    assert found <= OPEN, found - OPEN
