# SPDX-License-Identifier: Apache-2.0
"""An engine over two hosts: one result, and an error that names a host that is gone."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import torch
from clearbox_client.payloads import decode

from examples.demo import serving
from tests.multiprocess.apart import ON_CPU
from tests.multiprocess.hosts import Hosts, hosts, started
from tests.multiprocess.launch import VERSION
from tests.support.hf_reference import Reference, relative_error
from tests.support.models import llama
from vllm.capture_dataset import load_dataset
from vllm.capture_dataset.manifest import NAME, Manifest
from vllm.v1.capture.consumers.filesystem import read_request

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.timeout(1800),
]

LAYERS, WIDTH, NEW_TOKENS = 3, 64, 4
HOOKS = ("pre_attn", "post_attn", "post_block")
EVERYWHERE = {"hooks": dict.fromkeys(HOOKS, "all"), "positions": "all"}
START_SECONDS = 600
Body = dict[str, Any]


class Nodes(NamedTuple):
    """The processes of both nodes, and their logs."""

    client: httpx.Client
    processes: "list[subprocess.Popen[bytes]]"
    logs: list[Path]
    names: list[str]


def ask(client: httpx.Client, **fields: Any) -> httpx.Response:
    """A completion."""
    body = {"model": "m", "prompt": "The dog went", "max_tokens": NEW_TOKENS}
    body |= {"temperature": 0, "ignore_eos": True, "logprobs": 1}
    return client.post("/v1/completions", json=body | fields)


@contextmanager
def started_on(
    places: Hosts,
    folder: Path,
    model: Path,
    split: str,
    root: str,
    *,
    second: Path | None = None,
    options: Sequence[str] = (),
    version: str = "",
) -> Iterator[Nodes]:
    """Start both nodes; they may still load the model.

    The second has the checkpoint `second`, further `options`, and another `version`.
    """
    environment = {
        **serving.ENVIRONMENT,
        **ON_CPU,
        "VLLM_USE_V2_MODEL_RUNNER": "1" if split == "pipeline" else "0",
    }
    program = ["--served-model-name", "m", "--dtype", "float32", "--enforce-eager"]
    program += ["--max-model-len", "256", "--max-num-seqs", "4", "--enable-steering"]
    program += ["--gpu-memory-utilization", "0.2", f"--{split}-parallel-size", "2"]
    for consumer in ("inline", f"filesystem:root={root}"):
        program += ["--capture-consumers", consumer]
    program += ["--distributed-executor-backend", "mp", "--nnodes", "2"]
    program += ["--master-addr", places.addresses[0], "--node-rank"]
    ends = [
        ["0", "--host", "0.0.0.0", "--port", "8000"],
        ["1", "--headless", *options],
    ]
    launch = [sys.executable, "-m", "tests.multiprocess.launch"]
    models = model, second or model
    logs = [folder / f"log{index}" for index in range(2)]
    processes = [
        started(
            places.command(
                index, [*launch, str(models[index]), *program, *ends[index]]
            ),
            environment | places.environment(index) | {VERSION: version * index},
            logs[index],
        )
        for index in range(2)
    ]
    try:
        with httpx.Client(base_url=places.url, timeout=300) as client:
            yield Nodes(client, processes, logs, places.names)
    finally:
        for process in processes:
            serving.stop(process, patience=5)


def wait_until_ready(nodes: Nodes) -> None:
    deadline = monotonic() + START_SECONDS
    while nodes.processes[0].poll() is None and monotonic() < deadline:
        try:
            if nodes.client.get("/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            sleep(1)
    raise AssertionError(nodes.logs[0].read_text()[-5000:])


@pytest.fixture(scope="module")
def places() -> Iterator[Hosts]:
    with hosts() as found:
        yield found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("llama"), LAYERS)


def payload(response: httpx.Response) -> dict[tuple[int, str], torch.Tensor]:
    """The rows of `inline`."""
    assert response.status_code == 200, response.text
    result = response.json()["capture_results"]["inline"]
    assert result["status"] == "ok", result
    return {
        tap: torch.from_numpy(own) for tap, own in decode(result["payload"]).items()
    }


def checked_rows(
    client: httpx.Client, root: Path, model: Path, **fields: Any
) -> tuple[dict[tuple[int, str], torch.Tensor], Body]:
    """All rows of a request, as the library and files have them, and its answer."""
    capture = {"inline": EVERYWHERE, "filesystem": EVERYWHERE | {"request_id": "a"}}
    response = ask(client, capture=capture, capture_wait=True, **fields)
    rows, answer = payload(response), response.json()
    results = answer["capture_results"]
    assert results["filesystem"]["status"] == "ok", results
    stored = read_request(root, "default", "a")
    expected = Reference(model).stream(results["inline"]["payload"][0]["token_ids"])
    every = {(layer, hook) for layer in range(LAYERS) for hook in HOOKS}
    assert rows.keys() == stored.keys() == every
    for tap, found in rows.items():
        assert relative_error(found, expected[tap]) < 1e-4, tap
        assert torch.equal(found, stored[tap]), tap
    return rows, answer


@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_two_nodes_serve_as_one_and_a_killed_one_is_named(
    places: Hosts, model: Path, tmp_path: Path, split: str
) -> None:
    root = tmp_path / "files"
    with started_on(places, tmp_path, model, split, str(root)) as nodes:
        wait_until_ready(nodes)
        rows, _ = checked_rows(nodes.client, root, model)
        vector = np.random.default_rng(0).normal(size=WIDTH).tolist()
        # On either node with pipeline stages. Rows are read before they are changed.
        seen_at = {
            (0, "post_block"): (1, "pre_attn"),
            (2, "post_attn"): (2, "post_block"),
        }
        for (layer, hook), seen in seen_at.items():
            at = {hook: {str(layer): vector}}
            fields: Body = {"steering_vectors": at, "capture": {"inline": EVERYWHERE}}
            changed = payload(ask(nodes.client, **fields))
            prompt = len(rows[layer, hook]) - NEW_TOKENS + 1
            moved = (changed[seen] - rows[seen])[:prompt]
            added = torch.tensor(vector).expand_as(moved)
            assert torch.equal(
                changed[layer, hook][:prompt], rows[layer, hook][:prompt]
            )
            error = relative_error(moved, added)
            assert error < 1e-4 or (layer == 2 and moved.abs().max() > 0.1)
        _kill_the_second(nodes, root)


def _kill_the_second(nodes: Nodes, root: Path) -> None:
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    capture = {"filesystem": EVERYWHERE | {"request_id": "b"}}
    body = {"model": "m", "prompt": "x", "max_tokens": 200, "ignore_eos": True}
    with nodes.client.stream(
        "POST", "/v1/completions", json=body | {"stream": True, "capture": capture}
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        os.killpg(nodes.processes[1].pid, signal.SIGKILL)
        killed = monotonic()
        try:
            rest = list(lines)
        except httpx.TransportError as error:
            rest = [repr(error)]
    assert monotonic() - killed < 120, "upstream waits for 300 s"
    assert "[DONE]" not in rest[-2:] or any("error" in line for line in rest), rest
    nodes.processes[0].wait(120)
    log = nodes.logs[0].read_text()
    assert f"Node {nodes.names[1]} (" in log and "is gone, and rank 1" in log
    assert {path: path.read_bytes() for path in before} == before
    assert not [path for path in root.rglob("b/*.json")]


def capture(nodes: Nodes, source: Path, out: Path) -> "subprocess.Popen[bytes]":
    """Start `vllm capture` on the nodes, or resume it."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "capture"]
    command += [str(source), "--server", str(nodes.client.base_url), "--out", str(out)]
    command += ["--shard-size", "200K", "--concurrency", "4", "--resume"]
    with out.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def test_a_data_set_is_completed_after_a_node_was_killed(
    places: Hosts, model: Path, tmp_path: Path
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    draw = np.random.default_rng(0)
    prompts = draw.integers(10, 900, (300, 40)).tolist()
    source.write_text("\n".join(json.dumps({"prompt": one}) for one in prompts))
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        root = str(tmp_path / "files")
        with started_on(places, folder, model, "tensor", root) as nodes:
            wait_until_ready(nodes)
            command = capture(nodes, source, out)
            if number == 0:
                while not (out / NAME).exists() or not Manifest.read(out).shards:
                    assert command.poll() is None, out.with_suffix(".log").read_text()
                    sleep(0.05)
                os.killpg(nodes.processes[1].pid, signal.SIGKILL)
            status = command.wait(600)
            said = out.with_suffix(".log").read_text()
        if number == 0:
            assert status == 1 and "the server does not answer" in said, said[-3000:]
            assert not Manifest.read(out).complete
            load_dataset(out).verify()
    assert status == 0, said[-3000:]
    data, reference = load_dataset(out), Reference(model)
    assert data.manifest.complete and len(data) == len(prompts)
    sample = data.columns.column("sample").to_numpy()
    assert sample.tolist() == np.repeat(range(len(prompts)), 40).tolist()
    for number in (0, 150, 299):
        expected = reference.stream(prompts[number])[LAYERS - 1, "post_block"]
        found = data.layer(LAYERS - 1)[number]
        assert relative_error(found, expected) < 1e-4


def test_a_root_that_is_another_folder_on_each_node_is_refused_at_the_start(
    places: Hosts, model: Path, tmp_path: Path
) -> None:
    with started_on(places, tmp_path, model, "pipeline", "/dev/shm/rows") as nodes:
        assert nodes.processes[0].wait(START_SECONDS) != 0
        log = nodes.logs[0].read_text()
    assert "root='/dev/shm/rows' of node" in log
    assert f"another folder on node {places.names[1]}" in log
    assert "or use the consumer 'inline'" in log


@pytest.mark.parametrize("fact", ["version", "--capture-consumers", "weights"])
def test_a_node_that_differs_is_refused_at_the_start(
    places: Hosts, model: Path, tmp_path: Path, fact: str
) -> None:
    chosen: dict[str, Any] = {
        "version": {"version": "0.0.1"},
        "--capture-consumers": {"options": ["--capture-consumers", "memory"]},
        "weights": {
            "second": llama(tmp_path / "other", LAYERS, tie_word_embeddings=True)
        },
    }[fact]
    root = str(tmp_path / "files")
    with started_on(places, tmp_path, model, "tensor", root, **chosen) as nodes:
        assert nodes.processes[0].wait(START_SECONDS) != 0
        log = nodes.logs[0].read_text()
    first, other = places.names
    assert f"node {other} differs from node {first}: {fact} is " in log
    remedies = {"version": "same wheel", "weights": "copy one checkpoint"}
    assert remedies.get(fact, "with the same options") in log
