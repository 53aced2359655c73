# SPDX-License-Identifier: Apache-2.0
"""`vllm serve --distributed-executor-backend ray` captures, reads and steers."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import torch

from tests.interop.ray.conftest import PATIENCE_SECONDS
from tests.multiprocess.apart import ON_CPU
from tests.multiprocess.test_nodes import (
    EVERYWHERE,
    LAYERS,
    NEW_TOKENS,
    WIDTH,
    ask,
    checked_rows,
    payload,
)
from tests.support.hf_reference import relative_error
from tests.support.models import llama
from tests.support.server import OWN_WORKER, Server
from tests.support.waiting import until

pytestmark = [pytest.mark.interop, pytest.mark.e2e, pytest.mark.timeout(1800)]


class RayServer(Server):
    """A server with upstream's Ray executor on CPUs."""

    program = ("-m", "tests.interop.ray.serve")
    start_seconds = 600.0


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
    root = tmp_path_factory.mktemp(request.param) / "files"
    server = RayServer(
        model,
        *("--served-model-name", "m", "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "256", "--max-num-seqs", "4", "--enable-steering"),
        *("--gpu-memory-utilization", "0.2", "--enable-readouts"),
        *("--distributed-executor-backend", "ray"),
        *(f"--{request.param}-parallel-size", "2", "--capture-consumers", "inline"),
        *("--capture-consumers", f"filesystem:root={root}"),
        **ON_CPU | OWN_WORKER,
        RAY_ADDRESS=head[0],
        VLLM_USE_V2_MODEL_RUNNER="1" if request.param == "pipeline" else "0",
    )
    try:
        with httpx.Client(base_url=server.url, timeout=300) as client:
            yield client, root
    finally:
        server.close()


def test_rows_readouts_and_steering_are_those_of_the_model(
    served: tuple[httpx.Client, Path], model: Path
) -> None:
    client, root = served
    spec = {"kind": "norm", "hooks": {"post_block": "all"}, "positions": "all"}
    rows, answer = checked_rows(client, root, model, readouts={"n": spec})
    blocks = [rows[layer, "post_block"] for layer in range(LAYERS)]
    norms = torch.stack(blocks, dim=1).norm(dim=-1)
    read = torch.tensor(answer["readouts"]["n"]["norm"])
    torch.testing.assert_close(read, norms, rtol=1e-4, atol=1e-4)
    vector = np.random.default_rng(0).normal(size=WIDTH).tolist()
    steered = {"steering_vectors": {"post_block": {"0": vector}}}
    changed = payload(ask(client, capture={"inline": EVERYWHERE}, **steered))
    prompt = len(blocks[0]) - NEW_TOKENS + 1
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
    until(lambda: not workers(head[1]), PATIENCE_SECONDS)


def workers(head: int) -> list[psutil.Process]:
    """The actors that are ranks of an engine."""
    found = []
    for one in psutil.Process(head).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # It may have ended.
            # Named by Ray, or by vLLM, whichever was later.
            if " ".join(one.cmdline()).startswith(("ray::Worker", "VLLM::Worker")):
                found.append(one)
    return found
