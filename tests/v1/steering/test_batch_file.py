# SPDX-License-Identifier: Apache-2.0
"""Lines of a batch file are steered and captured like single requests."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.demo import serving
from vllm.v1.capture.consumers.filesystem import read_request
from vllm.v1.steering.spec.files import save_module

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MODEL = Path(__file__).parents[3] / "examples/demo_model/weights"
HIDDEN = 192
VECTOR = (np.random.default_rng(0).normal(size=HIDDEN) * 3).astype(np.float32)
SPEC = {"post_block": {"2": VECTOR.tolist()}}
CHAT = {"messages": [{"role": "user", "content": "Tell me about the dog."}]}

REQUESTS: dict[str, dict[str, Any]] = {
    "plain": CHAT,
    "named": {**CHAT, "steering_name": "loud"},
    "inline": {**CHAT, "steering_vectors": SPEC},
    "bad name": {**CHAT, "steering_name": "nobody"},
    # A shard is sealed up to a second after a request has finished: a response that
    # does not wait has a pending result.
    "captured": {
        **CHAT,
        "capture": {
            "filesystem": {
                "request_id": "captured",
                "layout": "sharded",
                "hooks": {"post_block": [0, 2]},
                "positions": "all",
            }
        },
    },
    "bad field": {**CHAT, "steering_vectorz": SPEC},
    # Upstream's batch runner has no such route.
    "bad route": {"prompt": "a", "capture": {"filesystem": {"hooks": {}}}},
}


def line(name: str) -> str:
    body = {"model": "m", "max_tokens": 8, "temperature": 0, **REQUESTS[name]}
    url = "/v1/completions" if name == "bad route" else "/v1/chat/completions"
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    created: Path = tmp_path_factory.mktemp("batch")
    return created


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, Any]:
    """The output lines of a batch run, by name."""
    module = folder / "loud.safetensors"
    save_module(module, {"post_block": {2: torch.from_numpy(VECTOR)}})
    (folder / "in.jsonl").write_text("\n".join(map(line, REQUESTS)) + "\n")
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "run-batch"]
    command += ["-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl")]
    command += ["--model", str(MODEL), "--served-model-name", "m", "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "256", "--enable-steering"]
    command += ["--steering-modules", f"loud={module}"]
    command += ["--capture-consumers", f"filesystem:root={folder / 'rows'}"]
    done = subprocess.run(
        command,
        env=os.environ | serving.ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = map(json.loads, (folder / "out.jsonl").read_text().splitlines())
    return {one["custom_id"]: one for one in lines}


def text(answers: dict[str, Any], name: str) -> str:
    content: str = answers[name]["response"]["body"]["choices"][0]["message"]["content"]
    return content


def test_a_batch_file_is_steered(answers: dict[str, Any]) -> None:
    assert text(answers, "named") == text(answers, "inline")
    assert text(answers, "named") != text(answers, "plain")


def test_a_batch_file_has_the_results_of_its_captures(
    answers: dict[str, Any], folder: Path
) -> None:
    body = answers["captured"]["response"]["body"]
    assert body["capture_results"]["filesystem"]["status"] == "ok"
    rows = read_request(folder / "rows", "default", "captured")
    usage = body["usage"]
    fed = usage["prompt_tokens"] + usage["completion_tokens"] - 1
    assert {tap: len(found) for tap, found in rows.items()} == {
        (0, "post_block"): fed,
        (2, "post_block"): fed,
    }


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bad name", "nobody"),
        ("bad field", "steering_vectors"),
        ("bad route", "Supported endpoints"),
    ],
)
def test_a_bad_line_is_refused_alone(
    answers: dict[str, Any], name: str, said: str
) -> None:
    refused = answers[name]
    assert refused["response"]["status_code"] == 400, refused
    assert said in json.dumps(refused)
