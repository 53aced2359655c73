# SPDX-License-Identifier: Apache-2.0
"""A worker process that sends rows in shared memory, and reports what is lent.

`python _worker.py ADDRESS`; each input line is a number of rows to send, "apart" and a
number, or a query. Answers are lines of JSON.
"""

import json
import sys

import torch

from vllm.v1.capture.memory.budget import collect_all
from vllm.v1.capture.memory.buffer_pool import ROWS
from vllm.v1.capture.results import GroupedRows, separated
from vllm.v1.capture.transport.zmq_channel import Outbox, ResultMessage
from vllm.v1.capture.types import CaptureResult

WIDTH, SPARE = 1024, 8


def result(rows: int) -> CaptureResult:
    """Two taps in one block with room for more; a value encodes its tap and row."""
    memory = ROWS.empty((2, rows + SPARE, WIDTH), torch.float32)[:, :rows]
    for layer in range(2):
        memory[layer] = torch.arange(rows)[:, None] + 1000 * layer
    positions = list(range(rows))
    facts = {"positions": positions, "token_ids": positions}
    taps = (0, "post_block"), (1, "post_block")
    payload = GroupedRows([(taps, memory, facts)])
    return CaptureResult(("r", -1, "*"), "ok", None, payload)  # type: ignore[arg-type]


def apart(rows: int) -> CaptureResult:
    """Two taps as tensors of their own, the second of which begins within a page."""
    memory = ROWS.empty((2, rows, WIDTH + 1), torch.float32)
    for layer in range(2):
        memory[layer] = torch.arange(rows)[:, None] + 1000 * layer
    payload = dict(zip(((0, "post_block"), (1, "post_block")), separated(memory)))
    return CaptureResult(("r", -1, "*"), "ok", None, payload)  # type: ignore[arg-type]


def main() -> None:
    outbox, address = Outbox(), sys.argv[1]
    for line in sys.stdin:
        if line.strip() == "lent":
            collect_all()
            print(json.dumps(outbox.lent()), flush=True)
            continue
        kind, _, rows = line.strip().rpartition(" ")
        made = apart(int(rows)) if kind == "apart" else result(int(rows))
        outbox.send(address, ResultMessage.of("r", "x", 0, made))


if __name__ == "__main__":
    main()
