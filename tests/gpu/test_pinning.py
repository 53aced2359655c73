# SPDX-License-Identifier: Apache-2.0
"""Pinning memory on a separate thread disturbs neither a recording nor the exit."""

import gc
import os
import subprocess
import sys
import threading

import pytest
import torch

from vllm.v1.capture.memory.pinned import pin
from vllm.v1.capture.memory.shared import SharedSegment

pytestmark = pytest.mark.gpu

SIZE = 64 << 20


def test_memory_is_pinned_and_unpinned_while_a_graph_is_recorded() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    errors: list[BaseException] = []
    values = torch.ones(8, device=device)
    graph = torch.cuda.CUDAGraph()

    def pin_some() -> None:
        try:
            for _ in range(3):
                pin(SharedSegment(SIZE).memory, device)
                gc.collect()
        except BaseException as error:
            errors.append(error)

    kept = SharedSegment(SIZE)
    pin(kept.memory, device)
    with torch.cuda.graph(graph):
        values.add_(1)
        thread = threading.Thread(target=pin_some)
        thread.start()
        thread.join()
        del kept  # Unpinned on the thread that records.
        values.mul_(2)
    assert not errors
    graph.replay()
    torch.cuda.synchronize()
    assert values.tolist() == [4.0] * 8


EXITS = f"""
import torch
from functools import partial
from vllm.v1.capture.memory.pinned import Pages, pin
torch.zeros(1, device="cuda")
Pages({SIZE}, {SIZE} * 64, partial(pin, device=torch.device("cuda", 0)), {SIZE} * 64)
"""


def test_a_process_that_exits_while_memory_is_pinned_does_not_abort() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", EXITS], env=os.environ, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert "terminate" not in ended.stderr
