# SPDX-License-Identifier: Apache-2.0
"""The imports of the fork server before it forks; nothing here may start threads."""

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Engines run eagerly; only the sampler would compile something, for seconds.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import transformers.models.auto.modeling_auto  # noqa: F401

import tests.parity.comparison
import tests.support.captured  # noqa: F401
import vllm.v1.engine.llm_engine
from tests.support.starts import shorten
from vllm.platforms import current_platform

if current_platform.is_cpu():
    # This changes modules that a GPU's worker uses too.
    import vllm.v1.worker.cpu_worker  # noqa: F401

shorten(pytest.MonkeyPatch())
