# SPDX-License-Identifier: Apache-2.0
"""Results as one HTML file: self-contained, and drawn in a browser."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clearbox_client import InputError
from clearbox_client.html import STATIC, document
from clearbox_client.replies import Reply

from tests.support.browser import opened

MARKUP = "</script><script>document.title = 'ran'</script><img src=x>"
TAPS = [[0, "post_block"], [1, "post_block"]]


def answer() -> dict[str, Any]:
    lens = {
        "kind": "lens",
        "positions": [0, 1],
        "taps": TAPS,
        "token_ids": [[[1, 2], [3, 4]], [[5, 1], [2, 3]]],
        "logprobs": [[[-0.1, -2.0], [-0.2, -1.0]], [[-0.5, -3.0], [-0.3, -2.0]]],
    }
    norm = {
        "kind": "norm",
        "positions": [0, 1],
        "taps": TAPS,
        "norm": [[1.0, 2.0], [3.0, 4.0]],
        "cosine": [[None, 0.5], [None, 0.6]],
    }
    return {
        "choices": [{"text": "b", "finish_reason": "length"}],
        "readouts": {"lens": lens, "norm": norm},
    }


@pytest.fixture(scope="module")
def tab() -> Iterator[Any]:
    with opened() as one:
        yield one


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    reply = Reply.of(answer(), ["a", MARKUP, "b"])
    reply.save_html(tmp_path / "reply.html", lambda ids: [f"word {one}" for one in ids])
    return tmp_path / "reply.html"


def test_the_file_refers_to_no_other_file(saved: Path) -> None:
    text = saved.read_text(encoding="utf-8")
    head = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r'(src|href)="?(?!data:)', head.partition("<script")[0])
    imports = json.loads(re.search(r'importmap">(.*?)</script>', text)[1])["imports"]
    assert "standalone.js" in imports and "vendor/preact-htm.js" in imports
    assert not any("views/" in name for name in imports), "views need a server"
    assert MARKUP not in text


def test_the_views_are_drawn_without_a_server(saved: Path, tab: Any) -> None:
    tab.goto(saved.as_uri())
    tab.wait_for_selector(".lens tbody tr >> nth=1")
    assert tab.locator(".tokens").count() == 2
    assert MARKUP in tab.inner_text(".tokens >> nth=0")
    assert "word␣2" in tab.inner_text(".lens")
    assert tab.locator(".token[style]").count() == 2
    tab.click(".lens td button >> nth=0")
    tab.wait_for_selector(".chart canvas")
    assert tab.title() == "Clearbox results"
    assert tab.errors == []


def test_maps_are_drawn_too(tmp_path: Path, tab: Any) -> None:
    sweep = {
        "layers": [0, 1],
        "positions": [0, 1],
        "tokens": ["a", "b"],
        "metric": "logprob",
        "grids": {"post_block": [[0.5, None], [1.0, 2.0]]},
    }
    path = tmp_path / "map.html"
    parts = [{"kind": "patch", "sweep": sweep}]
    path.write_text(document(parts), encoding="utf-8")
    tab.goto(path.as_uri())
    tab.focus(".heatmap canvas >> nth=-1")
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowDown")
    assert "layer 1, position 0 a: 1" in tab.inner_text(".reading >> nth=-1")
    assert tab.errors == []


def test_patterns_and_attribution_of_a_reply_are_drawn(
    tmp_path: Path, tab: Any
) -> None:
    pattern = {
        "kind": "attention",
        "positions": [1],
        "taps": [[3, "q"]],
        "weights": [[[0.25, 0.75]], [[0.5, 0.5]]],
    }
    why = {
        "kind": "attribution",
        "positions": [0, 1],
        "taps": [[0, "embed"], [0, "attn_add"], [0, "mlp_add"], [0, "rest"]],
        "logits": [[[0.0], [0.0], [0.0], [0.0]], [[1.5], [-2.5], [0.5], [None]]],
    }
    given = answer() | {"readouts": {"heads": pattern, "why": why}}
    reply = Reply.of(given, ["a", "b"])
    reply.save_html(tmp_path / "reply.html")
    tab.goto((tmp_path / "reply.html").as_uri())
    tab.wait_for_selector(".head >> nth=1")
    tab.hover("section >> nth=0 >> .tokens .token >> nth=1")
    first = "section >> nth=0 >> .tokens .token >> nth=0"
    title = tab.get_attribute(first, "title")
    assert title is not None and "0.25" in title
    tab.click(".head >> nth=1")
    tab.wait_for_selector("h3:text-is('Head 1')")
    tab.focus(".heatmap canvas >> nth=-1")
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowDown")
    assert "0 attn_add, token 0 of those asked for: -2.5" in tab.inner_text(
        ".reading >> nth=-1"
    )
    assert tab.errors == []
    for one in reply.readouts.values():
        assert "srcdoc" in one._repr_html_()


def test_a_notebook_shows_the_same_in_a_frame() -> None:
    shown = Reply.of(answer(), ["a", MARKUP, "b"])._repr_html_()
    assert 'sandbox="allow-scripts"' in shown
    assert MARKUP not in shown and STATIC.is_dir()


def test_a_reply_without_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="tokens=True"):
        Reply.of(answer()).save_html(tmp_path / "reply.html")
