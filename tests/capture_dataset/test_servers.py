# SPDX-License-Identifier: Apache-2.0
from collections import Counter
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.capture_dataset.remote import ServerLostError
from vllm.capture_dataset.runners import CaptureRunError
from vllm.capture_dataset.servers import ServersRunner
from vllm.capture_dataset.spec import ModelFacts
from vllm.v1.capture.errors import CaptureValidationError

FACTS = ModelFacts(
    name="m",
    architecture="",
    weights="w",
    tokenizer="",
    num_layers=2,
    hidden_size=4,
    max_model_len=64,
    dtype="float32",
    hook_points={0: ("post_block",)},
)
PROMPTS: Any = [SimpleNamespace(number=number) for number in range(200)]


class Server:
    """Answers with its name, and is lost after `lost_after` prompts."""

    concurrency = 3
    tokenizer = None

    def __init__(self, url: str, lost_after: int = 1000, **facts: Any) -> None:
        self.url, self.lost_after = url, lost_after
        self.model = FACTS if not facts else ModelFacts(**vars_of(FACTS) | facts)
        self.modules: dict[str, Any] = {}
        self.asked = self.at_once = self.most_at_once = 0
        self.wrong: set[int] = set()
        self._lock = Lock()

    def run_one(self, prompt: Any, rows: Any, tokens: Any) -> Any:
        with self._lock:
            self.asked += 1
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            lost = self.asked > self.lost_after
        with self._lock:
            self.at_once -= 1
        if lost:
            raise ServerLostError(f"{self.url} is gone")
        if prompt.number in self.wrong:
            raise CaptureRunError("not what was asked for")
        return prompt.number, self.url

    def readout_modules(self) -> dict[str, Any]:
        return self.modules

    def close(self) -> None:
        self.lost_after = 0


def vars_of(facts: ModelFacts) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in facts.__dataclass_fields__}


def run(*servers: Any, prompts: Any = PROMPTS) -> list[Any]:
    unused: Any = None
    return list(ServersRunner(servers).run(prompts, unused, unused))


def test_each_prompt_is_run_once_by_any_server_within_its_bound() -> None:
    servers = [Server("a"), Server("b")]
    found: Any = run(*servers)
    assert sorted(number for number, _ in found) == list(range(len(PROMPTS)))
    assert sum(one.asked for one in servers) == len(PROMPTS)
    assert all(one.most_at_once <= one.concurrency for one in servers)


@pytest.mark.parametrize("lost_after", [0, 1, 20])
def test_the_others_take_the_share_of_a_lost_server(lost_after: int) -> None:
    lost = Server("a", lost_after)
    runner = ServersRunner([lost, Server("b"), Server("c")])  # type: ignore[list-item]
    unused: Any = None
    for _ in range(2):  # It is not asked again for the next shard.
        found: Any = list(runner.run(PROMPTS, unused, unused))
        counts = Counter(number for number, _ in found)
        assert counts == Counter(range(len(PROMPTS)))
    assert lost.asked <= lost_after + lost.concurrency


def test_without_a_server_left_the_last_error_is_raised() -> None:
    with pytest.raises(ServerLostError, match="is gone"):
        run(Server("a", 3), Server("b", 5))


def test_an_answer_that_is_wrong_is_no_reason_to_ask_another_server() -> None:
    servers = [Server("a"), Server("b")]
    for server in servers:
        server.wrong = {17}
    with pytest.raises(CaptureRunError, match="not what was asked for"):
        run(*servers)


def test_a_caller_that_stops_ends_the_threads() -> None:
    unused: Any = None
    servers: Any = [Server("a"), Server("b")]
    rows = ServersRunner(servers).run(PROMPTS, unused, unused)
    next(rows)
    rows.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("facts", [{"weights": "x"}, {"dtype": "bfloat16"}])
def test_servers_of_other_models_are_refused(facts: dict[str, Any]) -> None:
    with pytest.raises(CaptureValidationError, match="b has another model than a"):
        run(Server("a"), Server("b", **facts))
    run(Server("a"), Server("b", name="other", max_model_len=9), prompts=PROMPTS[:4])


def test_servers_with_other_readout_modules_are_refused() -> None:
    other = Server("b")
    other.modules = {"probe": {"sha256": "1"}}
    with pytest.raises(CaptureValidationError, match="b has other readout modules"):
        run(Server("a"), other)
