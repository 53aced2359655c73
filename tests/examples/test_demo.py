# SPDX-License-Identifier: Apache-2.0
"""The demo: its server handling, its comparison, its picture, and a real run."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "demo"
sys.path.insert(0, str(DEMO))  # the examples are scripts, not an installed package

import comparing  # noqa: E402
import picture  # noqa: E402
import serving  # noqa: E402

# Answers /health once it listens; the port is the first argument.
HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
WITH_CHILD = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[2], "w").write(str(child.pid))
{HEALTHY}"""


def quiet(_seconds: float, _log: str) -> None:
    return None


def is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return status != "Z"  # a zombie has exited


def test_a_server_and_its_children_are_stopped_whatever_happens(
    tmp_path: Path,
) -> None:
    port, child = serving.free_port(0), tmp_path / "child"
    command = [sys.executable, "-c", WITH_CHILD, str(port), str(child)]
    url = f"http://{serving.HOST}:{port}"
    with (
        pytest.raises(KeyboardInterrupt),
        serving.running(command, url, tmp_path / "log", 30, quiet),
    ):
        pid = int(child.read_text())
        assert is_alive(pid)
        raise KeyboardInterrupt
    until(lambda: not is_alive(pid))
    assert serving.free_port(port) == port


def test_a_server_that_ends_early_is_reported_with_its_last_words(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    with (
        pytest.raises(serving.ServerFailure, match=r"status 3(.|\n)*no such model"),
        serving.running(command, "http://127.0.0.1:9", tmp_path / "log", 30, quiet),
    ):
        pytest.fail("it never became healthy")


def test_a_server_that_stays_silent_is_stopped(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with (
        pytest.raises(serving.ServerFailure, match="not ready within 2 s"),
        serving.running(command, "http://127.0.0.1:9", tmp_path / "log", 2, quiet),
    ):
        pytest.fail("it never became healthy")


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


def test_the_reference_reads_the_stream_where_the_hook_points_are() -> None:
    model = tiny_llama()
    ids = [3, 1, 4, 1, 5]
    rows = comparing.hidden_states(model, ids)
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        final = model.model.norm(rows[2, "post_block"])
    assert len(rows) == 9
    for layer in range(3):
        assert torch.equal(rows[layer, "pre_attn"], states[layer][0])
        assert not torch.equal(rows[layer, "post_attn"], rows[layer, "post_block"])
    assert torch.equal(rows[0, "post_block"], states[1][0])
    torch.testing.assert_close(final, states[3][0])  # HF normalizes its last one


def test_a_difference_shows_in_the_comparison() -> None:
    want = {(0, "pre_attn"): torch.eye(4)}
    (same,) = comparing.compare(want, want)
    assert same.cosine == pytest.approx(1) and same.error == 0
    turned = torch.eye(4)
    turned[2] = -turned[2]
    (other,) = comparing.compare({(0, "pre_attn"): turned}, want)
    assert other.cosine == pytest.approx(-1) and other.error == pytest.approx(1)
    assert other.norm == pytest.approx(1)


def test_missing_rows_are_an_error() -> None:
    want = {(0, "pre_attn"): torch.eye(4)}
    with pytest.raises(ValueError, match=r"captured \(3, 4\)"):
        comparing.compare({(0, "pre_attn"): torch.eye(4)[:3]}, want)


def test_the_picture_shows_the_embedding_and_every_block(tmp_path: Path) -> None:
    rows = comparing.hidden_states(tiny_llama(), [3, 1, 4, 1, 5])
    values = picture.norms(rows)
    assert [len(line) for line in values] == [5] * 4
    assert values[0][1] == pytest.approx(rows[0, "pre_attn"][1].norm().item())
    assert values[3][4] == pytest.approx(rows[2, "post_block"][4].norm().item())
    path = tmp_path / "norm.png"
    picture.draw(path, rows, list("abcde"), num_prompt_tokens=3)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_runs_and_leaves_a_picture_and_no_server(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind((serving.HOST, 0))
        taken.listen()
        command = [sys.executable, str(DEMO / "run.py"), "--tokens", "12"]
        command += ["--out", str(tmp_path), "--port", str(taken.getsockname()[1])]
        # Upstream's sampler would be compiled, for seconds.
        environment = os.environ | {"TORCHDYNAMO_DISABLE": "1"}
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=environment
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is taken; using" in done.stdout
    assert done.stdout.index("residual_norm.png") < done.stdout.index("registered:")
    shown = [int(one) for one in re.findall(r"\[#+ *\] +(\d+) %", done.stdout)]
    assert len(shown) > 2 and shown == sorted(set(shown)), "a line a stage"
    assert "HTTP 400" in done.stdout
    for name in ("story-anna", "story-max", "chat"):
        assert len(list((tmp_path / "captures" / "demo" / name).glob("*.bin"))) == 18
    assert "registered: 'gloomy'" in done.stdout
    lines = re.findall(r"vector times ([+-][\d.]+) +([+-][\d.]+)", done.stdout)
    scores = [float(score) for _, score in lines]
    assert len(scores) == 5 and scores == sorted(scores) and scores[0] < 0 < scores[-1]
    assert (tmp_path / "residual_norm.png").read_bytes().startswith(b"\x89PNG")
