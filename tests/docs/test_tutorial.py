# SPDX-License-Identifier: Apache-2.0
"""Every block of the tutorial runs, in its order; and `vllm steer` uses its server."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.docs._pages import ROOT, blocks
from tests.support.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(1200)]

PAGE = ROOT / "docs" / "start" / "tutorial.md"
MODEL = ROOT / "examples" / "demo_model" / "weights"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tutorial")
    (made / "examples").symlink_to(ROOT / "examples")
    return made


def words_of(command: str) -> list[str]:
    """The words of a command, which may have several lines."""
    return shlex.split(command.replace("\\\n", " "))


def run(folder: Path, command: str, *more: str) -> str:
    """Run a command `vllm ...` of a page."""
    _, *words = words_of(command)
    program = [sys.executable, Path(sys.executable).with_name("vllm"), *words, *more]
    with mock.patch.dict(os.environ):
        for name in ("VLLM_LOGGING_LEVEL", "PYTHONWARNINGS"):
            os.environ.pop(name, None)  # Tests ask for upstream's log, users do not.
        done = subprocess.run(program, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr, "no library warns"
    return done.stdout


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    """The tutorial's server, after its first steps."""
    script, *_ = blocks(PAGE, "python")
    subprocess.run([sys.executable, "-c", script], cwd=folder, check=True)
    train, evaluate, serve = blocks(PAGE, "sh")
    small = ("--gpu-memory-utilization", "0.2")
    told = run(folder, train, *small)
    assert "gloomy.safetensors" in told
    assert "AUROC" in run(folder, evaluate, *small)
    words = words_of(serve.replace("/tmp/flagged", str(folder / "flagged")))
    assert words[:3] == ["vllm", "serve", "examples/demo_model/weights"]
    named = [w.replace("=gloomy", f"={folder}/gloomy") for w in words[3:]]
    model = folder / "examples" / "demo_model" / "weights"
    small = (*small, "--enforce-eager", "--max-logprobs", "-1", "--enable-patching")
    opened = Server(model, *named, *small)
    yield opened
    opened.close()


def test_the_server_stops_and_keeps_what_it_flags(
    server: Server, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, watch, stop = blocks(PAGE, "python")
    names: dict[str, Any] = {}
    exec(watch.replace("http://localhost:8000", server.url), names)
    assert len(names["values"]) > 20
    assert all(0 <= value <= 1 for value in names["values"])  # As the page says.
    exec(stop, names)
    reply = names["reply"]
    assert reply.stop_reason == "readout:gloomy" and reply.finish_reason == "stop"
    assert reply.readouts["gloomy"]["values"][-1].max() > names["bound"]
    files = [Path(one) for one in reply.captures["filesystem"].payload]
    assert len(files) == 6 and all(one.is_file() for one in files)
    assert folder / "flagged" in files[0].parents
    assert "readout:gloomy" in capsys.readouterr().out


def test_the_readme_watches_and_patches(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    *_, script = blocks(ROOT / "README.md", "python")
    names: dict[str, Any] = {}
    exec(script.replace("Client()", f'Client("{server.url}")'), names)
    grid = names["grid"].values["post_block"]
    assert grid.shape[0] == 6 and np.isfinite(grid).all() and grid.std() > 0
    assert len(capsys.readouterr().out.splitlines()) > 10


def test_vectors_are_swept_and_evaluated_on_a_server_as_in_an_engine(
    server: Server, folder: Path
) -> None:
    tone = ROOT / "examples" / "steering" / "tone.safetensors"
    (folder / "harmless.txt").write_text("Anna went home.\nThe house by the river\n")
    pairs = [
        {"positive": f"{name} came home. The sun shone.", "negative": f"{name} wept."}
        for name in ("Anna", "Max", "Ben", "Ida")
    ]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    common = ["--vectors", str(tone), "--layers", "2", "--json"]
    sweep = ["steer", "sweep", *common, "OUT", "--prompt", "The sky was"]
    sweep += ["--scales", "-1,0,1", "--max-tokens", "8"]
    evaluate = ["steer", "eval", *common, "OUT", "--pairs", "pairs.jsonl"]
    evaluate += ["--harmless", "harmless.txt", "--doses", "0.1", "--max-tokens", "8"]
    engine = ["--model", str(MODEL), "--gpu-memory-utilization", "0.2"]
    for words in (sweep, evaluate):
        found = []
        for place in (["--server", server.url], engine):
            out = folder / f"{words[1]}-{len(place)}.json"
            command = shlex.join(["vllm", *words, *place]).replace("OUT", str(out))
            run(folder, command)
            found.append(json.loads(out.read_text()))
        served, own = map(numbers, found)
        assert len(served) == len(own) > 6
        assert served == pytest.approx(own, rel=0.1, abs=0.05)


def test_a_grid_is_asked_of_a_server(server: Server, folder: Path) -> None:
    out, words = folder / "grid.json", ["vllm", "patch", "the dog was", "the cat was"]
    words += ["--server", server.url, "--answer", " happy", "--json", str(out)]
    run(folder, shlex.join(words))
    assert len(json.loads(out.read_text())["values"]["post_block"]) == 6


def numbers(found: Any) -> list[float]:
    """All numbers of a JSON document, in order."""
    if isinstance(found, dict):
        return [one for key in sorted(found) for one in numbers(found[key])]
    if isinstance(found, list):
        return [one for part in found for one in numbers(part)]
    is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
    return [float(found)] if is_number else []
