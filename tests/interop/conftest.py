# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import llama


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def reference(model: Path) -> Any:
    """The model in transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


@pytest.fixture(scope="session")
def llm(model: Path) -> Iterator[Any]:
    """An engine with what vllm-lens and TransformerLens need."""
    from vllm import LLM
    from vllm.interop.transformer_lens import ENGINE

    opened = LLM(
        str(model),
        vllm_lens_api=True,
        dtype="float32",
        max_model_len=128,
        enforce_eager=True,
        **ENGINE,
    )
    yield opened
    opened.llm_engine.engine_core.shutdown()
