# SPDX-License-Identifier: Apache-2.0
"""Steering and capture through several API server processes of one server.

A change that one of them has confirmed holds for the others.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from time import sleep
from typing import Any, NamedTuple

import httpx
import numpy as np
import psutil
import pytest
import torch
from clearbox_client.payloads import decode

from tests.multiprocess import connections
from tests.multiprocess.apart import runner
from tests.multiprocess.connections import Connections
from tests.support.models import TOKENIZER
from tests.support.server import OWN_WORKER, Server
from tests.support.waiting import until
from vllm.v1.readouts.modules import save_probe

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.timeout(900),
]

SPLITS = {"pipeline": (2, 1), "data": (1, 2)}
"""Pipeline stages and data-parallel engines."""
HIDDEN = 192
KEY = "steering"
HUGE = {"post_block": {"1": [2e38] * HIDDEN}}
"""Twice this value overflows float32."""

Body = dict[str, Any]


class Launched(Server):
    """A server with the model runner that the environment names."""

    program = ("-m", "tests.multiprocess.launch")
    start_seconds = 400.0


class Servers(NamedTuple):
    """Two API server processes behind one port."""

    opened: Connections
    processes: list[int]

    def client(self, number: int) -> httpx.Client:
        """A new client of one of them."""
        return self.opened.to(number, self.processes)

    def at_once(
        self, count: int, act: Callable[[httpx.Client, int], httpx.Response]
    ) -> list[httpx.Response]:
        """What clients of both, each with a number, are answered at the same time."""
        clients = [self.client(number % 2) for number in range(count)]
        begin = threading.Barrier(count)

        def one(number: int) -> httpx.Response:
            begin.wait()
            return act(clients[number], number)

        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(one, range(count)))


@pytest.fixture(scope="module", params=list(SPLITS))
def servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp(request.param)
    stages, engines = SPLITS[request.param]
    arguments = ["--api-server-count", "2", "--data-parallel-size", str(engines)]
    arguments += ["--pipeline-parallel-size", str(stages)]
    for consumer in ("inline", f"filesystem:root={folder}/files"):
        arguments += ["--capture-consumers", consumer]
    server = Launched(
        TOKENIZER,
        *arguments,
        *("--enable-readouts", "--enable-steering", "--steering-api-key", KEY),
        *("--served-model-name", "m", "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "256", "--gpu-memory-utilization", "0.2"),
        **connections.ENVIRONMENT | OWN_WORKER,
        VLLM_USE_V2_MODEL_RUNNER=runner(stages),
    )
    try:
        with connections.connections(server.url) as opened:
            yield Servers(opened, opened.processes(2))
    finally:
        server.close()


@pytest.fixture
def both(servers: Servers) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """A client of each process, with all steering cleared."""
    one, other = servers.client(0), servers.client(1)
    carried_out(post(one, "clear"))
    for name in modules(one):
        carried_out(post(one, "modules/unregister", name=name))
    yield one, other


def post(client: httpx.Client, what: str, **body: Any) -> httpx.Response:
    """Request a change below `/v1/steering/`."""
    headers = {"Authorization": f"Bearer {KEY}"}
    return client.post(f"/v1/steering/{what}", json=body, headers=headers)


def carried_out(response: httpx.Response) -> Any:
    """Check that a change succeeded; returns the answer."""
    assert response.status_code == 200, response.text
    return response.json()


def refused(response: httpx.Response) -> Body:
    assert response.status_code == 400, response.text
    error: Body = response.json()["error"]
    return error


def modules(client: httpx.Client) -> Body:
    found: Body = carried_out(client.get("/v1/steering/modules"))["modules"]
    return found


def state(client: httpx.Client) -> Body:
    found: Body = carried_out(client.get("/v1/steering"))
    return found


def at(seed: int, layer: int = 2, hook: str = "post_block") -> Body:
    vector = np.random.default_rng(seed).normal(size=HIDDEN) * 3
    return {hook: {str(layer): vector.tolist()}}


def ask(client: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"model": "m", "prompt": "The dog went", "max_tokens": 6, "temperature": 0}
    return client.post("/v1/completions", json={**body, "logprobs": 1, **fields})


def answer(response: httpx.Response) -> list[float]:
    found: list[float] = carried_out(response)["choices"][0]["logprobs"][
        "token_logprobs"
    ]
    return found


def close(expected: list[float]) -> Any:
    return pytest.approx(expected, rel=1e-4, abs=1e-4)


Both = tuple[httpx.Client, httpx.Client]


def test_vectors_set_through_one_are_cleared_by_the_other(
    both: Both,
) -> None:
    one, other = both
    plain = answer(ask(one))
    told = carried_out(post(one, "set", vectors=at(1)))
    found = state(one)
    assert state(other) == found
    both_tell = told.keys() & found.keys()
    assert "vectors" in both_tell
    assert {name: told[name] for name in both_tell} == {
        name: found[name] for name in both_tell
    }
    # Data-parallel engines alternate, so each of them steers.
    steered = [answer(ask(client)) for client in (one, other) * 2]
    assert all(found == close(steered[0]) for found in steered)
    assert steered[0] != close(plain)
    merged = carried_out(post(other, "set", prefill_vectors=at(2)))
    assert merged["vectors"] == told["vectors"] == state(one)["vectors"]
    assert state(one)["prefill_vectors"] == merged["prefill_vectors"]
    carried_out(post(other, "clear"))
    assert not state(one)["vectors"]
    for client in (one, other) * 2:
        assert answer(ask(client)) == close(plain)


def test_a_name_is_known_at_once_replaced_and_forgotten_everywhere(both: Both) -> None:
    one, other = both
    plain = answer(ask(other))
    expected = answer(ask(other, steering_vectors=at(1)))
    carried_out(post(one, "modules/register", name="tone", vectors=at(1)))
    assert answer(ask(other, steering_name="tone")) == close(expected) != close(plain)
    assert modules(other) == modules(one)
    replaced = answer(ask(one, steering_vectors=at(2)))
    body = {"name": "tone", "vectors": at(2), "metadata": {"origin": "another"}}
    assert (
        "unregister it" in refused(post(other, "modules/register", **body))["message"]
    )
    carried_out(post(other, "modules/register", **body, replace=True))
    assert answer(ask(one, steering_name="tone")) == close(replaced)
    assert modules(one)["tone"]["metadata"]["origin"] == "another"
    carried_out(post(one, "modules/unregister", name="tone"))
    error = refused(ask(other, steering_name="tone"))
    assert error["param"] == "steering_name" and "'tone'" in error["message"]
    gone = post(other, "modules/unregister", name="tone")
    assert gone.status_code == 404 and "'tone'" in gone.text


def test_what_is_too_much_with_what_another_has_set_is_a_clients_mistake(
    both: Both,
) -> None:
    one, other = both
    carried_out(post(one, "modules/register", name="huge", vectors=HUGE))
    carried_out(post(one, "set", vectors=HUGE))
    ways: dict[str, Body] = {
        "steering_vectors": {"steering_vectors": HUGE},
        "prefill_steering_vectors": {"prefill_steering_vectors": HUGE},
        "steering_name": {"steering_name": "huge"},
    }
    for parameter, fields in ways.items():
        for client in both:
            error = refused(ask(client, **fields))
            assert error["param"] == parameter
            assert "with the engine's vectors" in error["message"]
            assert "GET /v1/steering" in error["message"]
    several = {"n": 2, "temperature": 1, "logprobs": None}
    refused(ask(other, steering_vectors=HUGE, **several))
    streamed = ask(other, steering_vectors=HUGE, stream=True).text
    assert '"code": 400' in streamed and "with the engine's vectors" in streamed
    carried_out(post(other, "clear"))
    carried_out(ask(one, steering_vectors=HUGE))
    carried_out(ask(other, steering_vectors=HUGE))


def test_a_refused_request_leaves_nothing_in_flight(both: Both) -> None:
    one, other = both
    carried_out(post(one, "set", vectors=HUGE))
    spec = {"hooks": {"post_block": "all"}, "positions": "last_prompt"}
    capture = {"inline": spec, "filesystem": {**spec, "request_id": "again"}}
    for _ in range(2):
        refused(ask(other, steering_vectors=HUGE, capture=capture))
    counters = carried_out(other.get("/v1/capture"))["counters"]
    assert counters["requests_in_flight"] == 0
    carried_out(post(one, "clear"))
    told = carried_out(ask(other, capture=capture, capture_wait=True))
    assert told["capture_results"]["filesystem"]["status"] == "ok"


def test_each_server_has_the_rows_of_its_own_requests(servers: Servers) -> None:
    spec = {"hooks": {"post_block": [1, 5]}, "positions": "all_prompt"}
    prompts = [f"Anna has {number} dogs" for number in range(8)]
    clients = [servers.client(number % 2) for number in range(len(prompts))]

    def rows(client: httpx.Client, prompt: str) -> Any:
        told = carried_out(ask(client, prompt=prompt, capture={"inline": spec}))
        assert told["capture_results"]["inline"]["status"] == "ok"
        return decode(told["capture_results"]["inline"]["payload"])

    with ThreadPoolExecutor(len(clients)) as pool:
        found = list(pool.map(rows, clients, prompts))
    for number, prompt in enumerate(prompts):
        through_the_other = rows(clients[number - 1], prompt)
        assert through_the_other.keys() == found[number].keys()
        for tap, again in through_the_other.items():
            assert found[number][tap] == pytest.approx(again, rel=1e-4, abs=1e-4)


@contextmanager
def halted() -> Iterator[None]:
    """Nothing ends meanwhile, as the engines stand still."""
    every = psutil.Process().children(recursive=True)
    engines = [one for one in every if "EngineCore" in " ".join(one.cmdline())]
    assert engines
    for one in engines:
        one.suspend()
    try:
        yield
    finally:
        for one in engines:
            one.resume()


def test_each_server_refuses_a_name_that_its_own_request_writes(
    servers: Servers,
) -> None:
    spec = {"hooks": {"post_block": [0]}, "positions": "all_generated"}
    named = {"filesystem": {**spec, "request_id": "shared"}}
    clients = [servers.client(number % 2) for number in range(4)]

    def capture(client: httpx.Client) -> httpx.Response:
        return ask(client, capture=named, capture_wait=True)

    with ThreadPoolExecutor(len(clients)) as pool:
        with halted():
            asked = [pool.submit(capture, client) for client in clients]
            for one in islice(as_completed(asked, timeout=60), 2):
                assert refused(one.result())["param"] == "capture.filesystem.request_id"
        answers = [one.result() for one in asked]
    for server in range(2):  # Files of two servers' requests follow one another whole.
        written, other = sorted(answers[server::2], key=lambda one: one.status_code)
        result = carried_out(written)["capture_results"]["filesystem"]
        assert result["status"] == "ok", result
        assert refused(other)["param"] == "capture.filesystem.request_id"
    for client in clients[:2]:
        carried_out(capture(client))


def test_each_server_tells_of_what_all_have_captured(
    servers: Servers, both: Both
) -> None:
    one, other = both
    spec = {"hooks": {"post_block": [0]}, "positions": "last_prompt"}
    counted = []
    for client in both:  # The other process may have had no capture.
        before = captured(client)
        carried_out(ask(one, capture={"inline": spec}))
        until(lambda client=client, before=before: captured(client) != before, 10)
        counted.append(captured(client) - before)
    assert counted == [1, 1]
    assert captured(one) == captured(other)
    assert carried_out(one.get("/v1/capture"))["api_servers"] == 2


def readout_modules(client: httpx.Client, what: str, **body: Any) -> httpx.Response:
    """Request a change of the names of probes."""
    headers = {"Authorization": f"Bearer {KEY}"}
    return client.post(f"/v1/readouts/modules/{what}", json=body, headers=headers)


def probes(folder: Path, count: int) -> list[str]:
    """Files of different probes."""
    paths = [str(folder / f"{number}.safetensors") for number in range(count)]
    for number, path in enumerate(paths):
        generator = torch.Generator().manual_seed(number)
        save_probe(path, torch.randn(1, HIDDEN, generator=generator), layer=2)
    return paths


def values(response: httpx.Response) -> list[float]:
    found: list[float] = carried_out(response)["readouts"]["p"]["values"]
    return np.ravel(found).tolist()


def test_a_probe_is_known_at_once_replaced_and_forgotten_everywhere(
    both: Both, tmp_path: Path
) -> None:
    one, other = both
    first, second = probes(tmp_path, 2)
    read = {"p": {"kind": "probe", "probe": "mood", "positions": "all_prompt"}}
    carried_out(readout_modules(one, "register", name="mood", path=first))
    each = [values(ask(client, readouts=read)) for client in (other, one) * 2]
    assert all(found == close(each[0]) for found in each)
    taken = readout_modules(other, "register", name="mood", path=second)
    assert "unregister it first" in refused(taken)["message"]
    changed = {"name": "mood", "path": second, "replace": True}
    carried_out(readout_modules(other, "register", **changed))
    for client in (one, other) * 2:
        assert values(ask(client, readouts=read)) != close(each[0])
        assert "mood" in carried_out(client.get("/v1/readouts/modules"))["modules"]
    # An entry of steering names it too, through a server that did not register it.
    when = {"probe": "mood", "above": -1e9}
    gated = {"post_block": {"2": {"vector": [3.0] * HIDDEN, "when": when}}}
    assert answer(ask(one, steering_vectors=gated)) != close(answer(ask(one)))
    carried_out(readout_modules(one, "unregister", name="mood"))
    for client in both:
        assert "'mood'" in refused(ask(client, readouts=read))["message"]
        assert "'mood'" in refused(ask(client, steering_vectors=gated))["message"]


def test_of_two_that_register_a_probe_at_the_same_time_one_is_refused(
    servers: Servers, both: Both, tmp_path: Path
) -> None:
    paths = probes(tmp_path, 8)

    def register(client: httpx.Client, number: int) -> httpx.Response:
        return readout_modules(client, "register", name="once", path=paths[number])

    answers = servers.at_once(len(paths), register)
    (taken,) = [n for n, found in enumerate(answers) if found.status_code == 200]
    for number, response in enumerate(answers):
        if number != taken:
            said = refused(response)["message"]
            assert "unregister it first" in said or "is being registered" in said
    read = {"p": {"kind": "probe", "probe": "once", "positions": "all_prompt"}}
    each = [values(ask(client, readouts=read)) for client in both * 2]
    for client in both:
        carried_out(readout_modules(client, "unregister", name="once"))
        again = {"name": "once", "path": paths[taken]}
        carried_out(readout_modules(client, "register", **again))
        each.append(values(ask(client, readouts=read)))
    assert all(found == close(each[0]) for found in each)
    carried_out(readout_modules(both[0], "unregister", name="once"))


def test_metrics_count_what_all_engines_have_captured_through_any_server(
    servers: Servers, both: Both
) -> None:
    spec = {"hooks": {"post_block": [0, 1]}, "positions": "last_prompt"}
    read = {"p": {"kind": "lens", "layers": [3], "positions": [0], "top_k": 1}}
    names = ("vllm:capture_rows_total", "vllm:readout_rows_total")
    before: list[float] = []
    while (now := [metric(both[0], name) for name in names]) != before:
        before = now
        sleep(2.5)  # Workers report about once a second, also what ran before.
    clients = [servers.client(number % 2) for number in range(4)] * 5

    def capture(client: httpx.Client) -> None:
        carried_out(ask(client, capture={"inline": spec}, readouts=read))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(capture, clients))
    wanted = [before[0] + 2 * len(clients), before[1] + len(clients)]
    for client in both:
        until(lambda client=client: [metric(client, n) for n in names] == wanted)


def metric(client: httpx.Client, name: str) -> float:
    """The sum of a metric over its labels."""
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def captured(client: httpx.Client) -> int:
    """The rows of the consumer `inline`."""
    counters = carried_out(client.get("/v1/capture"))["counters"]["consumers"]
    return int(counters["inline"]["rows"])
