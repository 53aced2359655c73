# SPDX-License-Identifier: Apache-2.0
"""`vllm serve --distributed-executor-backend ray` captures, reads and steers."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch

from examples.demo import serving
from tests.interop.ray.waiting import until
from tests.multiprocess.test_nodes import (
    EVERYWHERE,
    HOOKS,
    LAYERS,
    NEW_TOKENS,
    WIDTH,
    payload,
)
from tests.support.hf_reference import Reference, relative_error
from tests.support.models import llama
from vllm.v1.capture.consumers.filesystem import read_request

pytestmark = [pytest.mark.interop, pytest.mark.e2e, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("llama"), LAYERS)


@pytest.fixture(scope="module", params=["tensor", "pipeline"])
def served(
    request: pytest.FixtureRequest,
    head: tuple[str, int],
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[httpx.Client, Path]]:
    """A client of a server with two ranks or stages, and the folder of its files."""
    folder = tmp_path_factory.mktemp(request.param)
    port = serving.free_port(8890)
    url, root = f"http://{serving.HOST}:{port}", folder / "files"
    command = [sys.executable, "-m", "tests.interop.ray.serve", str(model)]
    command += ["--host", serving.HOST, "--port", str(port)]
    command += ["--served-model-name", "m", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "256", "--max-num-seqs", "4", "--enable-steering"]
    command += ["--gpu-memory-utilization", "0.2", "--enable-readouts"]
    command += ["--distributed-executor-backend", "ray"]
    command += [f"--{request.param}-parallel-size", "2"]
    for consumer in ("inline", f"filesystem:root={root}"):
        command += ["--capture-consumers", consumer]
    environment = {
        **serving.ENVIRONMENT,
        "RAY_ADDRESS": head[0],
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1" if request.param == "pipeline" else "0",
    }
    log = folder / "log"
    with (
        serving.running(command, url, log, 600, lambda _, __: None, environment),
        httpx.Client(base_url=url, timeout=300) as client,
    ):
        yield client, root


def ask(client: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"model": "m", "prompt": "The dog went", "max_tokens": NEW_TOKENS}
    body |= {"temperature": 0, "ignore_eos": True, "logprobs": 1}
    return client.post("/v1/completions", json=body | fields)


def test_rows_readouts_and_steering_are_those_of_the_model(
    served: tuple[httpx.Client, Path], model: Path
) -> None:
    client, root = served
    capture = {"inline": EVERYWHERE, "filesystem": EVERYWHERE | {"request_id": "a"}}
    spec = {"kind": "norm", "hooks": {"post_block": "all"}, "positions": "all"}
    response = ask(client, capture=capture, capture_wait=True, readouts={"n": spec})
    rows, answer = payload(response), response.json()
    assert answer["capture_results"]["filesystem"]["status"] == "ok"
    stored = read_request(root, "default", "a")
    every = {(layer, hook) for layer in range(LAYERS) for hook in HOOKS}
    assert rows.keys() == stored.keys() == every
    tokens = answer["capture_results"]["inline"]["payload"][0]["token_ids"]
    expected = Reference(model).stream(tokens)
    for tap, found in rows.items():
        assert relative_error(found, expected[tap]) < 1e-4, tap
        assert torch.equal(found, stored[tap]), tap
    blocks = [rows[layer, "post_block"] for layer in range(LAYERS)]
    norms = torch.stack(blocks, dim=1).norm(dim=-1)
    read = torch.tensor(answer["readouts"]["n"]["norm"])
    torch.testing.assert_close(read, norms, rtol=1e-4, atol=1e-4)
    vector = np.random.default_rng(0).normal(size=WIDTH).tolist()
    steered = {"steering_vectors": {"post_block": {"0": vector}}}
    changed = payload(ask(client, capture={"inline": EVERYWHERE}, **steered))
    prompt = len(tokens) - NEW_TOKENS + 1
    moved = (changed[1, "pre_attn"] - rows[1, "pre_attn"])[:prompt]
    assert relative_error(moved, torch.tensor(vector).expand_as(moved)) < 1e-4


def test_a_killed_actor_ends_requests_with_an_error(
    served: tuple[httpx.Client, Path], head: tuple[str, int]
) -> None:
    client, _ = served
    body = {"model": "m", "prompt": "x", "max_tokens": 200, "ignore_eos": True}
    capture = {"filesystem": EVERYWHERE | {"request_id": "b"}}
    with client.stream(
        "POST", "/v1/completions", json=body | {"stream": True, "capture": capture}
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        ranks = workers(head[1])
        assert len(ranks) == 2
        ranks[1].kill()
        try:
            rest = list(lines)
        except httpx.TransportError as error:
            rest = [repr(error)]
    assert any("rror" in line for line in rest), rest[-3:]
    until(lambda: not workers(head[1]))
    assert not workers(head[1])


def workers(head: int) -> list[psutil.Process]:
    """The actors that are ranks of an engine."""
    found = []
    for one in psutil.Process(head).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # It may have ended.
            if " ".join(one.cmdline()).startswith("ray::Worker"):
                found.append(one)
    return found
