# SPDX-License-Identifier: Apache-2.0
"""A small engine with steering, for the examples of this folder."""

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
TONE = Path(__file__).parent / "tone.safetensors"
"""Vectors that make the demo model's stories cheerful, or gloomy with scale -1. Written
by

python examples/steering/extract_and_steer.py --out examples/steering/tone.safetensors
"""


def small_engine(**options: Any) -> LLM:
    """An engine, by default on the demo model, that starts quickly."""
    print("starting the engine, up to half a minute", file=sys.stderr)
    usual = {"model": str(DEMO / "weights"), "enforce_eager": True}
    return LLM(enable_steering=True, **usual | options)
