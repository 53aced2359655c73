# SPDX-License-Identifier: Apache-2.0
"""Inspect's `get_model` and `eval` with a server, compared with Transformers."""

import asyncio
import base64
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("inspect_ai", reason="make test-interop")

import torch
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import read_eval_log
from inspect_ai.model import ChatMessageUser, GenerateConfig, get_model
from inspect_ai.scorer import Score, accuracy, scorer
from inspect_ai.solver import generate

from tests.support.server import Server
from vllm.interop.vllm_lens import SteeringVector

pytestmark = pytest.mark.interop

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
SAMPLES = 100


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    options = ["--enforce-eager", "--dtype", "float32", "--max-model-len", "128"]
    options += ["--vllm-lens-api", "--capture-consumers", "inline"]
    options += ["--enable-readouts", "--chat-template", TEMPLATE]
    running = Server(model, *options, "--gpu-memory-utilization", "0.2")
    yield running
    running.close()


def provided(provider: str, model: Path, server: Server):
    return get_model(f"{provider}/{model}", base_url=f"{server.url}/v1", memoize=False)


def asked(api, config: GenerateConfig):
    async def run():
        return await api.generate([ChatMessageUser(content="Anna went")], config=config)

    return asyncio.run(run())


def states_of(reference, output, **hook):
    metadata = output.metadata
    tokens = [*metadata["prompt_token_ids"], *metadata["token_ids"]][:-1]
    with torch.no_grad():
        return reference(torch.tensor([tokens]), output_hidden_states=True)


def test_activations_come_with_the_output(model, server, reference) -> None:
    extra = {"extra_args": {"output_residual_stream": [0, 1]}}
    config = GenerateConfig(max_tokens=4, temperature=0, extra_body=extra)
    output = asked(provided("vllm-lens", model, server), config)
    found = output.metadata["activations"]
    expected = torch.stack(states_of(reference, output).hidden_states[1:3])[:, 0]
    torch.testing.assert_close(found["residual_stream"], expected, rtol=0, atol=1e-4)
    payload = found["1:resid_post"]
    rows = torch.frombuffer(
        bytearray(base64.b64decode(payload["data"])), dtype=torch.float32
    )
    torch.testing.assert_close(
        rows.view(payload["shape"]), expected[1], rtol=0, atol=1e-4
    )


def test_steering_and_readouts_from_extra_body(model, server, reference) -> None:
    vector = torch.randn(1, 64) * 4
    steered = SteeringVector(activations=vector, layer_indices=[0])
    extra = {
        "extra_args": {"apply_steering_vectors": [steered]},
        "capture": {"inline": {"hooks": {"pre_attn": [1]}, "positions": "all"}},
        "readouts": {"lens": {"kind": "lens", "layers": [1], "top_k": 2}},
    }
    config = GenerateConfig(max_tokens=3, temperature=0, extra_body=extra)
    output = asked(provided("clearbox", model, server), config)
    entering = []
    first, second = reference.model.layers[:2]
    with (
        first.register_forward_hook(lambda _module, _inputs, out: out + vector),
        second.register_forward_pre_hook(lambda _m, given: entering.append(given[0])),
    ):
        states_of(reference, output)
    expected = entering[0][0]
    found = output.metadata["activations"]["1:resid_pre"].tensor
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert output.metadata["capture_results"]["inline"]["status"] == "ok"
    assert output.metadata["readouts"]["lens"]["kind"] == "lens"


@scorer(metrics=[accuracy()])
def has_activations():
    async def score(state, target):
        rows = state.output.metadata["activations"]["1:resid_post"]
        finite = bool(torch.isfinite(rows.tensor).all())
        return Score(value=1.0 if finite and rows["shape"][1] == 64 else 0.0)

    return score


def test_a_task_with_many_samples_logs_no_tensor(model, server, tmp_path) -> None:
    extra = {"extra_args": {"output_residual_stream": True}}
    task = Task(
        dataset=[Sample(input=f"Anna {n} went", target="x") for n in range(SAMPLES)],
        solver=generate(),
        scorer=has_activations(),
        config=GenerateConfig(max_tokens=2, temperature=0, extra_body=extra),
    )
    (log,) = eval(
        task,
        model=provided("vllm-lens", model, server),
        log_dir=str(tmp_path),
        log_format="json",
        display="none",
    )
    assert log.status == "success", log.error
    assert log.results.scores[0].metrics["accuracy"].value == 1.0
    text = Path(log.location).read_text()
    assert not re.search(r"[A-Za-z0-9+/]{200,}", text)
    assert '"original_dtype"' not in text
    assert len(read_eval_log(log.location).samples) == SAMPLES


def test_a_server_is_started_with_what_is_needed(monkeypatch, model) -> None:
    from inspect_ai.model._providers import vllm as inspects

    commands = []

    def start(command, **options):
        commands.append((command, options["server_args"]))
        return "http://127.0.0.1:1/v1", None, 1

    monkeypatch.setattr(inspects, "start_local_server", start)
    for provider in ("vllm-lens", "clearbox"):
        # Servers are shared by model, so each test has its own folder.
        own = shutil.copytree(model, model.parent / provider)
        api = get_model(f"{provider}/{own}", memoize=False, max_model_len=64).api
        api._resolve_server()
    (_, lens), (_, whole) = commands
    assert lens == {"vllm_lens_api": True, "max_model_len": 64}
    assert whole["enable_readouts"] is True and whole["capture_consumers"] == "inline"
