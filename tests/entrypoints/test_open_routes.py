# SPDX-License-Identifier: Apache-2.0
"""Which routes of a server with a key answer without it."""

import re
from pathlib import Path

from fastapi.routing import APIRoute
from starlette.testclient import TestClient

from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

ROOT = Path(__file__).parents[2]
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


def test_the_page_of_routes_has_every_one() -> None:
    """Those of our modules, apart from the names that two other systems have."""
    given = ["--enable-steering", "--steering-api-key", "s", "--enable-patching"]
    given += ["--capture-consumers", "inline", "--enable-readouts"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(given)
    ours = ("capture", "steering", "readouts", "patching")
    routes = {
        f"{method} {route.path}"
        for route in build_app(args, ("generate",)).routes
        if isinstance(route, APIRoute)
        and route.endpoint.__module__.startswith(
            tuple(f"vllm.entrypoints.serve.{name}." for name in ours)
        )
        for method in route.methods
    }
    page = (ROOT / "docs" / "reference" / "routes.md").read_text()
    listed = re.findall(r"^\| `((?:GET|POST|DELETE) /v1/[^`]*)` \|", page, re.M)
    assert len(routes) > 20 and sorted(listed) == sorted(routes)
