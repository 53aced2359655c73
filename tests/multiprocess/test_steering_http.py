# SPDX-License-Identifier: Apache-2.0
"""Steering over HTTP: servers of several processes answer like one of one process."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.multiprocess.steered import HIDDEN, LAYERS, carried_out, post, served

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.timeout(900),
]

OPTIONS: dict[str, list[str]] = {
    "one": [],
    "tensor": ["--tensor-parallel-size", "2"],
    "pipeline": ["--pipeline-parallel-size", "2"],
}
"""On a CPU only the V2 runner supports several stages."""

Server = tuple[httpx.Client, Path]
"""A client, and the file that names the failing rank."""


@contextmanager
def split_over(split: str, folder: Path) -> Iterator[Server]:
    """The demo model, served over the processes of a split."""
    runner = {"VLLM_USE_V2_MODEL_RUNNER": "1" if split == "pipeline" else "0"}
    with (
        served(folder, 8860, OPTIONS[split], runner) as (url, fault),
        httpx.Client(base_url=url, timeout=120) as client,
    ):
        yield client, fault


def vector(seed: int) -> list[float]:
    found: list[float] = np.random.default_rng(seed).normal(size=HIDDEN).tolist()
    return found


def at(seed: int, layer: int, hook: str = "post_block", **more: Any) -> dict[str, Any]:
    return {hook: {str(layer): {"vector": vector(seed), "scale": 2} | more}}


def complete(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": "The dog went", "max_tokens": 8, "temperature": 0}
    response = client.post("/v1/completions", json={**body, "logprobs": 1, **fields})
    choice = carried_out(response)["choices"][0]
    return {"text": choice["text"], "logprobs": choice["logprobs"]["token_logprobs"]}


REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "first stage": {"steering_vectors": at(1, 1)},
    "last stage": {"steering_vectors": at(2, 4, "post_attn")},
    "both stages": {"steering_vectors": at(3, 0, "pre_attn") | at(4, 5)},
    "prompt": {"prefill_steering_vectors": at(5, 2)},
    "generated": {"decode_steering_vectors": at(6, 3)},
    "operation": {"steering_vectors": at(7, 3, op="project_out", scale=1)},
    "named": {"steering_name": "loud"},
}


def answers(client: httpx.Client) -> dict[str, Any]:
    """A server's answers to each request and route, in a fixed order."""
    told: dict[str, Any] = {"layers": carried_out(client.get("/v1/steering/layers"))}
    module = {"vectors": at(8, 1) | at(9, 4, "pre_attn"), "decode_vectors": at(3, 5)}
    told["register"] = carried_out(
        post(client, "modules/register", name="loud", **module)
    )
    told["modules"] = carried_out(client.get("/v1/steering/modules"))
    for name, fields in REQUESTS.items():
        told[name] = complete(client, **fields)
    told["set"] = carried_out(
        post(client, "set", vectors=at(1, 1), prefill_vectors=at(2, 4))
    )
    told["merge"] = carried_out(post(client, "set", vectors=at(3, 5, "post_attn")))
    told["get"] = carried_out(client.get("/v1/steering"))
    told["under all"] = complete(client)
    told["on top"] = complete(client, **REQUESTS["both stages"])
    told["clear"] = carried_out(post(client, "clear"))
    told["cleared"] = complete(client)
    return told


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answers of one process."""
    with split_over("one", tmp_path_factory.mktemp("one")) as (client, _):
        return answers(client)


@pytest.fixture(scope="module", params=["tensor", "pipeline"])
def split(
    request: pytest.FixtureRequest,
    whole: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    with split_over(request.param, tmp_path_factory.mktemp(request.param)) as server:
        yield server


def test_every_answer_is_that_of_one_process(
    split: Server, whole: dict[str, Any]
) -> None:
    found = answers(split[0])
    assert list(found) == list(whole)
    for name, expected in whole.items():
        assert found[name] == close(expected), name
    assert sorted(whole["layers"]["layers"]) == [str(n) for n in range(LAYERS)]
    steered = {tuple(whole[name]["logprobs"]) for name in REQUESTS}
    assert len(steered) == len(REQUESTS), "two of the requests are answered alike"
    assert whole["under all"] != close(whole["plain"])
    assert whole["cleared"] == close(whole["plain"])


def close(expected: Any) -> Any:
    """Equal except for the last digits of numbers."""
    if isinstance(expected, dict):
        return {name: close(value) for name, value in expected.items()}
    if isinstance(expected, list):
        return [close(value) for value in expected]
    is_number = isinstance(expected, float)
    return pytest.approx(expected, rel=1e-4, abs=1e-4) if is_number else expected


@pytest.mark.parametrize("rank", [0, 1])
def test_a_change_that_fails_on_one_rank_changes_none(split: Server, rank: int) -> None:
    client, flag = split
    carried_out(post(client, "set", vectors=at(1, 1) | at(2, 4), replace=True))
    before, said = carried_out(client.get("/v1/steering")), complete(client)
    flag.write_text(str(rank))
    try:
        for what, body in (("set", {"vectors": at(3, 0) | at(4, 5)}), ("clear", {})):
            failed = post(client, what, **body)
            assert failed.status_code == 500, failed.text
            assert "no rank has changed" in failed.text
            assert f"rank {rank}" in failed.text
            assert carried_out(client.get("/v1/steering")) == before
            assert complete(client) == close(said)
    finally:
        flag.unlink()
    carried_out(post(client, "set", vectors=at(3, 0) | at(4, 5)))
    assert complete(client) != close(said)
    carried_out(post(client, "clear"))
