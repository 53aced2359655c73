# SPDX-License-Identifier: Apache-2.0
"""The files of the page: size, headers, and that they reach the tree."""

import re
from argparse import Namespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from fork.building.contents import added_files
from fork.paths import HERE
from vllm.entrypoints.serve.lens_page.route import STATIC, attach_router

MOST_BYTES = 120_000
FILES = [path for path in STATIC.rglob("*") if path.is_file()]
OWN = [path for path in FILES if "vendor" not in path.parts]


def client(enabled: bool) -> TestClient:
    app = FastAPI()
    attach_router(app, Namespace(enable_lens_page=enabled))
    return TestClient(app)


def test_the_own_files_are_small_and_in_the_tree() -> None:
    assert sum(path.stat().st_size for path in OWN) <= MOST_BYTES
    added = added_files(HERE)
    base = "vllm/entrypoints/serve/lens_page/static"
    wanted = {f"{base}/{path.relative_to(STATIC).as_posix()}" for path in FILES}
    assert wanted <= added.keys()
    assert f"{base}/vendor/LICENSE.preact" in wanted


def test_nothing_is_loaded_from_elsewhere_or_interpreted_as_markup() -> None:
    for path in OWN:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"https?://|//cdn", text), path
        assert not re.search(r"innerHTML|dangerously|insertAdjacent|eval\(", text), path
        assert not re.search(r"(local|session)Storage|document\.cookie", text), path


@pytest.mark.parametrize("path", ["", "app.js", "views/lens.js", "vendor/uplot.js"])
def test_every_file_has_the_policy_and_needs_no_key(path: str) -> None:
    reply = client(True).get(f"/lens/{path}")
    assert reply.status_code == 200
    policy = reply.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert reply.headers["X-Content-Type-Options"] == "nosniff"
    types = {"": "text/html", "app.js": "javascript"}
    assert types.get(path, "") in reply.headers["Content-Type"]


@pytest.mark.parametrize("path", ["/lens/", "/lens/app.js"])
def test_a_server_without_the_option_has_no_page(path: str) -> None:
    assert client(False).get(path).status_code == 404


@pytest.mark.parametrize("path", ["../route.py", "%2e%2e/route.py", "..%2froute.py"])
def test_no_other_file_is_served(path: str) -> None:
    assert client(True).get(f"/lens/{path}").status_code == 404
