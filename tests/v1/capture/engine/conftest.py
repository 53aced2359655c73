# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import asynchronous
from tests.support.captured import CapturedEngine
from tests.support.models import llama


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session", params=["sync", "async"])
def engine(request: pytest.FixtureRequest, model: Path) -> Iterator[CapturedEngine]:
    """An engine with chunked prompts: 24 tokens per step for all requests."""
    ahead = request.param == "async"
    with asynchronous.allowed():
        opened = CapturedEngine(
            model, max_num_batched_tokens=24, async_scheduling=ahead
        )
    config = opened.llm.llm_engine.vllm_config
    assert config.scheduler_config.async_scheduling == ahead
    yield opened
    opened.close()
