# SPDX-License-Identifier: Apache-2.0
"""The real model, for the examples of this folder."""

import os
import sys
from pathlib import Path
from typing import Any

# Upstream's log and warnings would hide the output; INFO shows the log.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("PYTHONWARNINGS", "ignore")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB

from vllm import LLM

sys.path.insert(0, str(Path(__file__).parents[1] / "real_model"))

from convert import checkpoint

HAPPY = """I love this, it is wonderful!
What a happy and joyful day.
She laughed with delight.
The party was fantastic and fun.
I am so glad and grateful.
Everything went perfectly, great news!
The sunshine made us smile.
He was proud and cheerful.""".splitlines()
SAD = """I hate this, it is terrible!
What a sad and miserable day.
She cried with grief.
The funeral was awful and grim.
I am so sorry and hopeless.
Everything went wrong, bad news!
The storm made us weep.
He was ashamed and gloomy.""".splitlines()


def model(**options: Any) -> LLM:
    """SmolLM2 in an engine that captures, reads out, steers and patches."""
    print("starting the engine, up to half a minute", file=sys.stderr)
    return LLM(
        str(checkpoint()),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        capture_consumers=["inline"],
        enable_readouts=True,
        enable_patching=True,
        **options,
    )
