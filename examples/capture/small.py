# SPDX-License-Identifier: Apache-2.0
"""A small engine with capture consumers, for the examples of this folder."""

import os
from pathlib import Path
from typing import Any

from vllm import LLM

DEMO = Path(__file__).parents[1] / "demo_model"
DEMO_MODEL = DEMO / "weights"

# The engine takes little memory and starts quickly.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
SMALL: dict[str, Any] = {"max_model_len": 256, "enforce_eager": True}


def small_engine(model: Path, consumer: str) -> LLM:
    """An engine with one consumer."""
    return LLM(str(model), capture_consumers=[consumer], **SMALL)
