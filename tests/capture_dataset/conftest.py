# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator

import pytest

from tests.capture_dataset._collecting import ROOT
from vllm.capture_dataset.runners import CONSUMER, EngineRunner


@pytest.fixture(scope="session")
def runner() -> Iterator[EngineRunner]:
    """An engine of the demo model, shared because it takes seconds to start."""
    from vllm import LLM

    llm = LLM(
        str(ROOT / "examples/demo_model/weights"),
        dtype="float32",
        enforce_eager=True,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        capture_consumers=[CONSUMER],
        enable_readouts=True,
    )
    opened = EngineRunner(llm)
    yield opened
    opened.close()
