# SPDX-License-Identifier: Apache-2.0
"""A process that is forked after tensors were computed can compute, too."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.models import llama
from vllm.v1.readouts.modules import save_probe
from vllm.v1.steering.spec.files import save_module

SCRIPT = """
import os, sys, time
import torch
from vllm import EngineArgs

torch.set_num_threads(2)
torch.ones(1 << 22).exp()
model, vectors, probe = sys.argv[1:]
files = {"steering_modules": {"file": vectors}, "readout_modules": {"file": probe}}
EngineArgs(model, enable_steering=True, **files).create_engine_config()
child = os.fork()
if child == 0:
    torch.ones(1 << 22).exp()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
torch.ones(1 << 22).exp()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks")
def test_an_engine_starts_after_files_were_read(tmp_path: Path) -> None:
    """Before, it waited forever for threads that only its parent had."""
    model = llama(tmp_path / "llama")
    vectors, probe = tmp_path / "vectors.safetensors", tmp_path / "probe.safetensors"
    width = json.loads((model / "config.json").read_text())["hidden_size"]
    save_module(vectors, {"post_block": {0: torch.ones(width)}})
    save_probe(probe, torch.ones(1, width), layer=0)
    command = [sys.executable, "-c", SCRIPT, *map(str, (model, vectors, probe))]
    subprocess.run(command, check=True, timeout=300)
