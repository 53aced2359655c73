# SPDX-License-Identifier: Apache-2.0
"""Every view in Chromium, on the demo model and on SmolLM2."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import fields
from io import StringIO
from statistics import median
from time import perf_counter
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe

from tests.support.browser import opened
from tests.support.models import TOKENIZER
from tests.support.real_model import real_model
from tests.support.server import Server
from tests.v1.readouts._reading import draw
from tests.v1.residual.sae import _layouts
from vllm import LLM, EngineArgs
from vllm.v1.readouts.modules import save_probe

pytestmark = [pytest.mark.page, pytest.mark.e2e, pytest.mark.slow]

KEY = "sesame-opens-4711"
WIDTHS = {"demo": 192, "smollm2": 576}
LAYERS = {"demo": 6, "smollm2": 30}
HEADS = {"demo": 6, "smollm2": 9}
PROMPT = "Anna went to the garden after lunch."
VIEWS = ("write", "lens", "attention", "steer", "patch", "features", "server")
MARKUP = "<img src=x onerror=alert(1)><script>alert(2)</script>"


class Keyed(Server):
    """A server that asks for a key."""

    modules: dict[str, Any]
    """The options of `LLM` for the server's files."""

    def _request(self, path: str, body: Any, headers: dict[str, str]) -> Any:
        key = {"Authorization": f"Bearer {KEY}"}
        return super()._request(path, body, key | headers)


@pytest.fixture(scope="module", params=list(WIDTHS))
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder, width = tmp_path_factory.mktemp("page"), WIDTHS[request.param]
    save_probe(folder / "mood.safetensors", draw(1, width), draw(1), layer=2)
    _layouts.saelens(
        folder / "sae",
        _layouts.chosen(
            _layouts.parts(3, width, 64),
            *("W_enc", "W_dec", "b_enc", "b_dec", "threshold"),
        ),
        architecture="jumprelu",
        metadata={"hook_name": "blocks.2.hook_resid_post"},
    )
    vector = [float(value) for value in draw(width, seed=5)]
    tone = {"vectors": {"post_block": {"2": vector}}}
    (folder / "tone.json").write_text(json.dumps(tone))
    model = TOKENIZER if request.param == "demo" else real_model()
    (folder / "model").symlink_to(model)
    server = Keyed(
        folder / "model",
        *("--served-model-name", request.param, "--enable-lens-page"),
        *("--enable-readouts", "--enable-steering", "--capture-consumers", "inline"),
        *("--hook-points", "q", "z", "--enable-patching"),
        *("--readout-modules", f"mood={folder / 'mood.safetensors'}"),
        *("--sae", f"small={folder / 'sae'}"),
        *("--steering-modules", f"tone={folder / 'tone.json'}"),
        *("--api-key", KEY, "--steering-api-key", "another"),
        *("--max-model-len", "512", "--max-num-seqs", "8", "--enforce-eager"),
    )
    server.modules = {
        "model": str(folder / "model"),
        "readout_modules": {"mood": str(folder / "mood.safetensors")},
        "sae": {"small": str(folder / "sae")},
        "steering_modules": {"tone": str(folder / "tone.json")},
    }
    yield server
    server.close()


@pytest.fixture(scope="module")
def offline(server: Keyed) -> Iterator[LLM]:
    """An engine with the server's model and options."""
    llm = LLM(
        **server.modules,
        enable_readouts=True,
        enable_patching=True,
        hook_points=["q", "z"],
        max_model_len=512,
        max_num_seqs=8,
        enforce_eager=True,
        num_gpu_blocks_override=64,
        disable_log_stats=False,
    )
    yield llm
    llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def tab(server: Server) -> Iterator[Any]:
    with opened() as tab:
        tab.goto(server.url + "/lens/")
        tab.fill("input[name=key]", "wrong")
        tab.click("form button")
        tab.wait_for_selector("form .problem")
        tab.fill("input[name=key]", KEY)
        tab.click("form button")
        tab.wait_for_selector("textarea")
        yield tab
        assert tab.errors == []


def show(tab: Any, **state: Any) -> None:
    """Show the view of a URL, without losing the key."""
    tab.evaluate("hash => { location.hash = hash }", urlencode(state))


def model_of(tab: Any) -> str:
    return str(tab.inner_text("header .note"))


def generate(tab: Any, **state: Any) -> None:
    show(tab, view="write", prompt=PROMPT, max=12, **state)
    tab.click("button:has-text('Generate')")
    tab.wait_for_selector("text=/first token after/")
    tab.wait_for_selector("button:has-text('Generate')")


@pytest.mark.parametrize("tint", ["surprise", "norm", "probe:mood", "sae:small"])
def test_tokens_are_tinted(tab: Any, tint: str) -> None:
    generate(tab, tint=tint)
    text = tab.inner_text(".tokens")
    assert PROMPT in text and len(text) > len(PROMPT) + 20
    tinted = tab.locator(".token[style]").count()
    assert tinted >= 12, "prompt tokens are tinted too"
    assert tab.locator(".problem").count() == 0
    tab.wait_for_timeout(400)
    assert "out=" in tab.url, "the generated text is in the URL"


def test_another_tint_is_read_of_the_same_text(tab: Any) -> None:
    generate(tab, tint="surprise")
    tab.wait_for_selector(".token[title*=surprise] >> nth=-1")
    tab.wait_for_timeout(400)
    text, link = tab.inner_text(".tokens"), tab.url.partition("#")[2]
    tab.select_option("label:has-text('Tint by') select", "norm")
    tab.wait_for_selector(".token[title*='norm of a layer'] >> nth=12")
    assert tab.inner_text(".tokens") == text
    show(tab, view="lens", prompt="Something else entirely")
    tab.wait_for_selector(".tokens >> text=entirely")
    tab.evaluate("hash => { location.hash = hash }", link)
    tab.wait_for_selector(".token[title*=surprise] >> nth=12")
    assert tab.inner_text(".tokens").split() == text.split()


def test_a_chat_is_shown_with_its_template(tab: Any) -> None:
    generate(tab, mode="chat", tint="norm")
    assert re.search(r"<\|(user|im_start)\|>", tab.inner_text(".tokens"))
    assert tab.locator(".problem").count() == 0


def test_the_lens_lists_layers_and_draws_pinned_tokens(tab: Any) -> None:
    show(tab, view="lens", prompt=PROMPT, token=3)
    tab.wait_for_selector(".lens tbody tr")
    assert tab.locator(".lens tbody tr").count() == LAYERS[model_of(tab)]
    tab.click(".lens tbody tr:first-child td:nth-child(2) button")
    tab.wait_for_selector(".chart canvas")
    pinned = tab.inner_text(".pin").removesuffix(" ×")
    first = tab.inner_text(".lens tbody tr:first-child td:nth-child(2) .word")
    assert pinned == first


def test_steering_shows_the_pair_its_dose_and_divergence(tab: Any) -> None:
    show(tab, view="steer", prompt=PROMPT, scales='{"tone": 3}', max=6)
    tab.wait_for_selector("output")
    told = tab.inner_text("output")
    assert float(re.search(r"at least (\S+)", told)[1]) > 0
    assert float(re.search(r"dose (\S+)", told)[1]) > 0
    tab.click("button:has-text('Generate both')")
    tab.wait_for_selector("button:has-text('Generate both')")
    tab.wait_for_selector("section:has(h3:text-is('steered')) .token >> nth=10")
    assert "post_block 2" in tab.inner_text("table")


def listed(logprobs: np.ndarray, count: int = 20) -> list[tuple[int, float]]:
    """The likeliest tokens, as the server lists them."""
    return [(int(k), float(logprobs[k])) for k in np.argsort(-logprobs)[:count]]


def test_the_divergence_is_a_useful_lower_bound(tab: Any) -> None:
    random = np.random.default_rng()
    steered, plain = random.normal(0, 5, (2, 300, 500))
    plain[:100] = steered[:100] + random.normal(0, 0.3, (100, 500))
    steered, plain = (
        x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (steered, plain)
    )
    true = (np.exp(steered) * (steered - plain)).sum(-1)
    lists = [[listed(p), listed(q)] for p, q in zip(steered, plain)]
    bounds = tab.evaluate(
        "async lists => { const found = await import('/lens/views/pair.js');"
        "return lists.map(one => found.klAtLeast(...one)); }",
        lists,
    )
    share = np.array(bounds) / true
    assert share.max() <= 1 + 1e-6
    # Most of their likely tokens differ in the last 200 pairs.
    print(
        f"of the divergence: {np.median(share[:100]):.2f}, {np.median(share[100:]):.2f}"
    )
    assert np.median(share[:100]) > 0.9 and np.median(share[100:]) > 0.2


def test_it_is_told_where_conditions_fired(tab: Any) -> None:
    width = WIDTHS[model_of(tab)]
    place = {"layer": 1, "hook": "post_block"}
    when = {"probe": [1.0] * width, **place, "above": -1e9}
    entry = {"vector": [1.0] * width, "when": when}
    vector = json.dumps({"post_block": {"2": entry}})
    show(tab, view="steer", prompt=PROMPT, vector=vector, max=4)
    tab.wait_for_selector("h3:text-is('Where conditions fired')")
    told = tab.inner_text("main ul li")
    found = re.search(r"layer 1, \S+: (\d+) of (\d+) tokens, first at position 0", told)
    assert found and found[1] == found[2] != "0", told


def test_a_pasted_vector_is_checked_where_it_is_pasted(tab: Any) -> None:
    show(tab, view="steer", prompt=PROMPT, vector="[1, 2")
    assert "JSON" in tab.inner_text("fieldset .problem")
    show(tab, view="steer", prompt=PROMPT, vector='{"post_block": {"2": [1, 2]}}')
    tab.wait_for_selector(".problem >> text=/post_block|width|values/")


def test_features_of_a_token_over_the_text_and_clamped(tab: Any) -> None:
    show(tab, view="features", prompt=PROMPT, token=3)
    tab.click(".bars button >> nth=0")
    tab.wait_for_selector(".token[style]")
    tab.fill("section:has(h3:text('Clamp')) input[type=number]", "40")
    tab.press("section:has(h3:text('Clamp')) input[type=number]", "Enter")
    tab.wait_for_selector("output")
    assert "dose" in tab.inner_text("output")


def test_the_server_is_shown_live(tab: Any) -> None:
    show(tab, view="server")
    tab.wait_for_selector("th:text-is('inline')")
    tab.wait_for_selector("text=vllm:readout_rows_total")
    assert tab.locator(".chart canvas").count() == 2


def test_a_sweep_fills_the_map_and_a_cell_is_completed(tab: Any) -> None:
    corrupt = PROMPT.replace("garden", "old market")  # Some positions have no cells.
    show(tab, view="patch", clean=PROMPT)
    tab.wait_for_selector("button:disabled:has-text('Sweep')")
    show(tab, view="patch", clean=PROMPT, corrupt=corrupt, answer=" She")
    tab.click("button:has-text('Sweep')")
    tab.wait_for_selector("button:has-text('Sweep')")
    tab.wait_for_selector("text=/noise floor \\d/")
    assert tab.locator("main .problem").count() == 0
    bar = tab.locator("progress")
    assert int(bar.get_attribute("value")) == int(bar.get_attribute("max")) > 0
    tab.focus("[aria-label^='Patching map']")
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("h3:text-is('Completion with this cell patched')")
    assert "␣" not in tab.inner_text("main .text")
    assert tab.locator("main .problem").count() == 0
    tab.wait_for_timeout(400)
    assert "cell=%5B1%2C0%5D" in tab.url
    cells = tab.locator("[aria-label^='Patching map']")
    box = cells.bounding_box()
    cells.hover(position={"x": box["width"] - 5, "y": box["height"] - 5})
    last = LAYERS[model_of(tab)] - 1
    tab.wait_for_selector(f".reading >> text=/^layer {last}, position/")


def test_a_head_of_attention_its_score_and_its_ablation(tab: Any) -> None:
    show(tab, view="attention", prompt=PROMPT, layer=1, head=1)
    tab.wait_for_selector("h3:text-is('Head 1')")
    assert tab.locator(".heads .head").count() == HEADS[model_of(tab)]
    assert tab.locator(".heads .head.chosen").inner_text() == "1"
    tab.wait_for_selector("section:has(h3:text-is('Head 1')) .token[style]")
    tab.click(".heads .head >> nth=0")
    tab.wait_for_selector("h3:text-is('Head 0')")
    for score in (
        "to the previous token",
        "to the first token",
        "induction",
        "entropy",
    ):
        tab.click(f"button:has-text('{score}')")
        tab.wait_for_selector(f"[aria-label^='Heads by their score {score}']")
    tab.click("button:has-text('Ablate head 0')")
    tab.wait_for_selector("h3:text-is('Next token after')")
    tab.check("text=who looks at the token")
    tab.click("section:has(h3:text-is('Head 0')) .token >> nth=2")
    assert tab.locator("main .problem").count() == 0
    tab.wait_for_timeout(400)
    for part in ("score=entropy", "ablate=true", "back=true", "token=2", "head=0"):
        assert part in tab.url


def test_a_long_text_is_cut_to_what_a_request_may_read(tab: Any) -> None:
    long = "Anna went to the garden. " * 100
    show(tab, view="attention", prompt=long, layer=1, head=0, score="induction")
    tab.wait_for_selector("text=/The first \\d+ tokens are shown/")
    tab.wait_for_selector("[aria-label^='Heads by their score induction']")
    assert tab.locator("main .problem").count() == 0
    box = tab.locator(".heads canvas >> nth=0").bounding_box()
    assert box["width"] <= 90, "heads of a long text are small maps too"


@pytest.mark.parametrize("view", ["lens", "attention", "features"])
def test_a_prompt_can_be_typed_in_each_view(tab: Any, view: str) -> None:
    show(tab, view=view)
    tab.type("textarea", "Anna went", delay=150)
    tab.wait_for_selector(".tokens >> text=went")
    tab.type("textarea", " home", delay=300)
    tab.wait_for_selector(".tokens >> text=home")


@pytest.mark.parametrize("view", VIEWS)
def test_what_each_view_copies_can_be_run(
    tab: Any,
    server: Keyed,
    offline: LLM,
    view: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Started:
        """Checks its options, and is the engine that is there."""

        def __new__(cls, model: str, **options: Any) -> Any:
            assert options.keys() <= {one.name for one in fields(EngineArgs)}
            known = dict(server.modules)
            assert model == known.pop("model")
            for name, modules in known.items():
                assert options.get(name, {}).keys() <= modules.keys()
            return offline

    monkeypatch.setattr("vllm.LLM", Started)
    monkeypatch.setenv("API_KEY", KEY)
    asked = {"prompt": PROMPT, "token": 2, "max": 4, "tint": "probe:mood"}
    asked |= {"scales": '{"tone": 1}', "feature": 3, "clamp": 5, "ablate": "true"}
    show(tab, view=view, clean=PROMPT, corrupt=PROMPT, answer=" She", **asked)
    tab.wait_for_selector(".copy")
    if view not in ("patch", "server"):
        tab.wait_for_timeout(1500)  # Requests name the tokens of the text.
    for group in tab.locator(".copy").all():
        said = []
        for name in ("curl", "client", "LLM"):
            group.locator(f"button:text-is('{name}')").click()
            text = group.locator("pre").inner_text()
            assert KEY not in text
            said.append(run_snippet(name, text))
        if view == "write":
            assert said[1].partition(" {")[0] == said[2].partition(" {")[0]


def run_snippet(name: str, text: str) -> str:
    if name == "curl":
        if shutil.which("curl") is None:
            return ""
        command = ["bash", "-c", text]
        done = subprocess.run(command, env=os.environ, capture_output=True, text=True)
        assert done.returncode == 0 and '"error"' not in done.stdout, done.stdout[:500]
        return done.stdout
    said = StringIO()
    with redirect_stdout(said):
        exec(compile(text, name, "exec"), {})
    assert said.getvalue()
    return said.getvalue()


def test_markup_is_shown_and_not_run(tab: Any) -> None:
    dialogs: list[Any] = []
    tab.on("dialog", lambda dialog: (dialogs.append(dialog), dialog.dismiss()))
    show(tab, view="lens", prompt=MARKUP, token=2)
    tab.wait_for_selector(".lens tbody tr")
    assert MARKUP in tab.inner_text(".tokens")
    show(tab, view="write", prompt=MARKUP, max=2)
    tab.click("button:has-text('Generate')")
    tab.wait_for_selector("text=/first token after/")
    assert MARKUP in tab.inner_text(".tokens")
    assert tab.locator("main img, main script").count() == 0
    assert dialogs == []


def test_the_policy_refuses_inline_code(tab: Any) -> None:
    ran = tab.evaluate(
        "() => { const s = document.createElement('script');"
        "s.textContent = 'document.title = \"ran\"'; document.body.append(s);"
        "s.remove(); return document.title; }"
    )
    assert ran == "Clearbox lens"


def test_the_key_is_nowhere(tab: Any, server: Server) -> None:
    generate(tab)
    assert KEY not in tab.url
    kept = "() => JSON.stringify([document.documentElement.outerHTML, localStorage, "
    values = "[...document.querySelectorAll('input')].map(one => one.value)])"
    assert KEY not in tab.evaluate(kept + "sessionStorage, document.cookie, " + values)
    assert KEY not in server.log.read_text()


@pytest.mark.parametrize("view", ["server", "lens", "write"])
def test_a_lost_connection_is_said_and_resumed(tab: Any, view: str) -> None:
    show(tab, view=view, prompt=PROMPT, max=4)
    shown = {"server": "th:text-is('inline')", "lens": ".lens", "write": ".token"}
    tab.wait_for_selector(shown[view])
    tab.context.set_offline(True)
    if view == "lens":
        tab.click(".token >> nth=1")
    elif view == "write":
        tab.click("button:has-text('Generate')")
    tab.wait_for_selector(".problem >> text=Trying again")
    tab.context.set_offline(False)
    tab.wait_for_selector(".problem", state="detached")
    if view == "write":
        tab.wait_for_selector("text=/first token after/")


def test_a_module_that_is_registered_later_is_there(tab: Any, server: Server) -> None:
    show(tab, view="write", prompt=PROMPT)
    spec = {"post_block": {"1": [1.0] * WIDTHS[model_of(tab)]}}
    body = {"name": "late", "vectors": spec}
    key = {"Authorization": "Bearer another"}
    answer = server.post("/v1/steering/modules/register", body, **key)
    assert answer.status == 200, answer.body
    show(tab, view="steer", prompt=PROMPT)
    tab.wait_for_selector("fieldset >> text=late")
    show(tab, view="server")
    tab.click("summary:text-is('Named vectors')")
    tab.wait_for_selector("pre >> text=/late/")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_a_small_screen(
    tab: Any, server: Server, scheme: str
) -> None:
    size = {"width": 360, "height": 800}
    small = tab.context.browser.new_page(viewport=size, color_scheme=scheme)
    small.goto(server.url + "/lens/")
    small.fill("input[name=key]", KEY)
    small.click("form button")
    small.wait_for_selector("textarea")
    for view in VIEWS:
        show(small, view=view, prompt=PROMPT)
        small.wait_for_timeout(500)
        assert small.evaluate("document.documentElement.scrollWidth") <= 360, view
    small.close()


def test_the_first_token_is_as_early_as_the_api_s(tab: Any, server: Server) -> None:
    body = {
        "model": model_of(tab),
        "prompt": PROMPT,
        "max_tokens": 2,
        "temperature": 0,
        "logprobs": 5,
    }
    direct, page = [], []
    for _ in range(5):
        begun = perf_counter()
        next(server.stream("/v1/completions", body))
        direct.append((perf_counter() - begun) * 1000)
        generate(tab)
        page.append(float(tab.get_attribute("[data-first]", "data-first")))
    print(f"first token: API {median(direct):.0f} ms, page {median(page):.0f} ms")
    assert median(page) < median(direct) + 100


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_view_passes_an_accessibility_audit(tab: Any, scheme: str) -> None:
    """The rules of axe-core, contrast and names for screen readers among them."""
    tab.emulate_media(color_scheme=scheme)
    broken = []
    for view in VIEWS:
        show(tab, view=view, prompt=PROMPT, token=3, tint="norm")
        tab.wait_for_timeout(1500)
        for found in Axe().run(tab).response["violations"]:
            broken += [(view, found["id"], node["html"]) for node in found["nodes"]]
    assert broken == []
