# SPDX-License-Identifier: Apache-2.0
"""Which routes of a server with a key answer without it."""

import json
import re
from pathlib import Path

from fastapi.routing import APIRoute
from starlette.testclient import TestClient

from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

ROOT = Path(__file__).parents[2]


def open_routes() -> set[str]:
    """What a stranger has, according to the page about security."""
    page = (ROOT / "docs" / "operate" / "security.md").read_text()
    (may,) = re.findall(r"^\| stranger \|[^|]*\|([^|]*)\|", page, re.M)
    return set(re.findall(r"`(/[^`]*)`", may))


def test_a_stranger_has_the_routes_that_the_page_names(tmp_path: Path) -> None:
    """Each route of upstream's and of ours, with every option that adds some."""
    profiler = {"profiler": "torch", "torch_profiler_dir": str(tmp_path)}
    given = ["--api-key", "k", "--steering-api-key", "s", "--enable-steering"]
    given += ["--capture-consumers", "inline", "--enable-readouts"]
    given += ["--interp-engine-api", "--vllm-lens-api", "--enable-patching"]
    given += ["--enable-lens-page", "--profiler-config", json.dumps(profiler)]
    given += ["--enable-fault-tolerance", "--enable-tokenizer-info-endpoint"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(given)
    app = build_app(args, ("generate", "transcription"))
    app.state.args = args
    client = TestClient(app, raise_server_exceptions=False)
    found, asked = set(), 0
    for route in app.routes:
        path = re.sub("[{}]", "", route.path)
        for method in getattr(route, "methods", ["GET"]):  # A mounted page has none.
            asked += 1
            if client.request(method, path, json={}).status_code != 401:
                found.add(route.path)
    assert asked > 80
    assert found == open_routes()


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
