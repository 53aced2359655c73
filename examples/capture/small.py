# SPDX-License-Identifier: Apache-2.0
"""A small engine with capture consumers, for the examples of this folder."""

import os
import sys
from pathlib import Path
from typing import Any

# Upstream's log and warnings would hide the output; INFO shows the log.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("PYTHONWARNINGS", "ignore")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB

from vllm import LLM

DEMO = Path(__file__).parents[1] / "demo_model"
DEMO_MODEL = DEMO / "weights"

SMALL: dict[str, Any] = {"max_model_len": 256, "enforce_eager": True}
"""Engine arguments for little memory and a quick start."""


def small_engine(model: Path, consumer: str) -> LLM:
    """An engine with one consumer."""
    print("starting the engine, up to half a minute", file=sys.stderr)
    return LLM(str(model), capture_consumers=[consumer], **SMALL)
