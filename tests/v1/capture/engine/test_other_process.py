# SPDX-License-Identifier: Apache-2.0
"""The engine core in a separate process: rows and results cross a socket."""

from collections.abc import Iterator
from time import monotonic, sleep

import pytest

from tests.support import asynchronous
from tests.support.captured import CapturedEngine, asking, prompt
from tests.support.hf_reference import relative_error
from tests.support.models import llama
from vllm import envs

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CapturedEngine]:
    with asynchronous.allowed(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        envs.disable_envs_cache()
        engine = CapturedEngine(
            llama(tmp_path_factory.mktemp("llama")),
            max_num_batched_tokens=24,
            async_scheduling=True,
        )
    core = engine.llm.llm_engine.engine_core
    assert not hasattr(core, "engine_core"), "the core runs in this process"
    yield engine
    engine.close()


def test_rows_reach_a_ready_instance_here(remote: CapturedEngine) -> None:
    prompts = [prompt(5 + 20 * i, seed=600 + i) for i in range(5)]
    for output in remote.run(prompts, asking("all", max_tokens=6)):
        assert output.capture_results["keeper"].status == "ok"  # type: ignore[attr-defined]
        remote.check(output)


def test_the_only_request_may_be_aborted(remote: CapturedEngine) -> None:
    engine = remote.llm.llm_engine
    asked, ids = asking("all", max_tokens=200), prompt(10, seed=620)
    engine.add_request("gone", {"prompt_token_ids": ids}, asked)
    tokens: list[int] = []
    while len(tokens) < 3:
        for output in engine.step():
            tokens = list(output.outputs[0].token_ids)
    engine.abort_request(["gone"])
    # Nothing else runs: the idle engine must still be informed of the end.
    deadline = monotonic() + 20
    while ("gone", 0) not in remote.keeper.rows and monotonic() < deadline:
        sleep(0.05)
    expected = remote.reference.stream([*ids, *tokens][:-1])
    rows = remote.keeper.rows["gone", 0]
    for tap, found in rows.items():
        assert relative_error(found, expected[tap]) < 1e-4
