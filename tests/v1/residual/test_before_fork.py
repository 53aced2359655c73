# SPDX-License-Identifier: Apache-2.0
"""A process forked after files were read can use all of torch."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import contextlib, os, sys
from types import SimpleNamespace as Fields
import torch
from vllm.v1.readouts.engine_args import described_file
from vllm.v1.readouts.errors import ReadoutValidationError
from vllm.v1.readouts.modules import save_probe
from vllm.v1.residual.before_fork import on_own_thread

torch.set_num_threads(2)
path, alone = sys.argv[1], sys.argv[2] == "alone"
on_own_thread(save_probe)(path, torch.randn(16, 1 << 14), layer=0)
read = described_file if alone else described_file.__wrapped__
with contextlib.suppress(ReadoutValidationError):  # the wrong width, after reading
    read("probe", path, Fields(get_hidden_size=lambda: 8, model="m"))
child = os.fork()
if child == 0:
    torch.ones(1 << 22).exp()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks")
def test_an_engine_starts_after_large_modules_were_read(tmp_path: Path) -> None:
    """Before, it waited forever for threads that only its parent had."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "p.safetensors"), "alone"]
    subprocess.run(command, check=True, timeout=300)
