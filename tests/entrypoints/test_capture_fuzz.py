# SPDX-License-Identifier: Apache-2.0
"""Every request is either captured or refused without side effects."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPT = [20, 30, 40, 50, 60, 70]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a story"}]},
}
SMALL = {"model": "tiny", "max_tokens": 3, "temperature": 0.0, "ignore_eos": True}

quick = settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
    ],
)


class Watched:
    """A server, and the state that a refused request must not change."""

    def __init__(self, server: Server, root: Path) -> None:
        self.server = server
        self._root = root
        self._files = self._now()

    def _now(self) -> set[Path]:
        return {path for path in self._root.rglob("*") if "fuzz" in str(path)}

    def check_refusal(self, text: str) -> None:
        assert "Traceback" not in text and "Internal Server Error" not in text
        assert self._now() == self._files, "a refused request has left files"

    def served(self) -> None:
        """Note that a request was served, which may write files."""
        self._files = self._now()

    def close(self) -> None:
        """Check that nothing is in flight and that a good request is served."""
        spec = {"hooks": {"post_block": "all"}, "positions": "all"}
        body = SMALL | {"prompt": PROMPT, "capture": {"inline": spec}}
        status, reply = self.server.post("/v1/completions", body)
        assert status == 200, reply
        result = reply["capture_results"]["inline"]
        assert result["status"] == "ok"
        assert [rows["positions"] for rows in result["payload"]] == [[*range(8)]] * 3
        counters = self.server.get("/v1/capture").body["counters"]
        assert counters["requests_in_flight"] == 0
        for consumer in counters["consumers"].values():
            assert consumer["queue_depth"] == consumer["queue_bytes"] == 0


@pytest.fixture(scope="module")
def watched(capture_server: Server, capture_root: Path) -> Iterator[Watched]:
    found = Watched(capture_server, capture_root)
    yield found
    found.close()


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["all", "../../etc", "/", "\x00", "NaN", "post_block"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=5,
)
ranges = st.lists(st.lists(st.integers(-1, 4), min_size=1, max_size=3), max_size=2)
layers = (
    st.just("all")
    | st.lists(st.integers(-1, 3), max_size=3)
    | st.fixed_dictionaries({}, optional={"layers": st.just([0]), "ranges": ranges})
    | junk
)
hooks = st.dictionaries(
    st.sampled_from(["pre_attn", "post_attn", "post_block", "mlp_in"])
    | st.text(max_size=3),
    layers,
    max_size=2,
)
positions = (
    st.sampled_from(["last_prompt", "all_prompt", "all_generated", "all"])
    | st.lists(st.integers(-2, 9), max_size=4)
    | junk
)
names = st.sampled_from(["fuzz", "fuzz/../..", "/fuzz", "fuzz a", ""]) | junk
specs = st.fixed_dictionaries(
    {"hooks": hooks | junk},
    optional={
        "positions": positions,
        "request_id": names,
        "layout": st.sampled_from(["per_file", "packed", "tar"]) | junk,
        "encoding": st.sampled_from(["base64", "zstd", "gzip"]) | junk,
        "extra": junk,
    },
)
captures = st.dictionaries(
    st.sampled_from(["filesystem", "inline", "logging", "nobody"]),
    specs | junk,
    max_size=2,
)


def selects(layers: Any) -> bool:
    """Whether a value selects layers of the model, in a simple form."""
    if not isinstance(layers, list):
        return layers == "all"
    right = all(type(layer) is int and 0 <= layer < 3 for layer in layers)
    return right and len(set(layers)) == len(layers) > 0


def is_well_formed(name: str, spec: Any) -> bool:
    """A sufficient condition for a valid spec, which must be served."""
    known = {"hooks", "positions"} | ({"encoding"} if name == "inline" else set())
    if name == "nobody" or not isinstance(spec, dict) or not spec.keys() <= known:
        return False
    hooks = spec.get("hooks")
    return (
        isinstance(hooks, dict)
        and bool(hooks)
        and hooks.keys() <= {"pre_attn", "post_attn", "post_block"}
        and all(map(selects, hooks.values()))
        and spec.get("encoding", "zstd") in ("base64", "zstd")
        and spec.get("positions", "all") in ("all", "last_prompt", "all_prompt")
    )


def has_no_number(spec: Any) -> bool:
    """Whether a value contains NaN or infinity, which JSON lacks."""
    if isinstance(spec, dict):
        return any(map(has_no_number, spec.values()))
    if isinstance(spec, list):
        return any(map(has_no_number, spec))
    return isinstance(spec, float) and not math.isfinite(spec)


@pytest.mark.parametrize("path", ROUTES)
def test_a_spec_that_is_nearly_right_is_captured_or_refused(
    watched: Watched, path: str
) -> None:
    @quick
    @given(capture=captures)
    def check(capture: dict[str, Any]) -> None:
        for name, spec in capture.items():
            if name == "filesystem" and isinstance(spec, dict):
                spec.setdefault("tag", "fuzz")
        body = SMALL | ROUTES[path] | {"capture": capture, "capture_wait": True}
        status, reply = watched.server.post(path, body)
        assert status in (200, 400), reply
        if status == 400:
            watched.check_refusal(json.dumps(reply))
            fine = all(is_well_formed(*item) for item in capture.items())
            assert not (capture and fine), f"a good spec was refused: {reply}"
            return
        watched.served()
        if not capture:
            return  # an empty object requests nothing
        assert not has_no_number(capture)
        assert "nobody" not in capture
        results = reply["capture_results"]
        for name in capture:
            assert results[name]["status"] in ("ok", "partial_error"), results[name]

    check()


@pytest.mark.parametrize("name", ["capture", "capture_wait"])
@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/chat/completions/batch", {"messages": [ROUTES["/v1/chat/completions"]]}),
        ("/v1/messages", {"messages": ROUTES["/v1/chat/completions"]["messages"]}),
        ("/tokenize", {"prompt": "hello"}),
    ],
)
def test_a_route_that_cannot_capture_refuses_to(
    watched: Watched, path: str, body: dict[str, Any], name: str
) -> None:
    asked: Any = {"inline": {"hooks": {"post_block": "all"}}}
    field = {name: asked if name == "capture" else True}
    status, reply = watched.server.post(path, {"model": "tiny"} | body | field)
    assert status == 400, reply
    watched.check_refusal(json.dumps(reply))
