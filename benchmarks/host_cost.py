# SPDX-License-Identifier: Apache-2.0
"""Claim: a captured step costs the engine's thread little, at many layers as at one.

    python benchmarks/host_cost.py [--requests 32] [--steps 256] [--out host_cost.json]

On a GPU a step is limited by what the CPU does for it. This runs what capture does
there, without a model: requests decode one token a step, rows of a 1B-class model (16
layers of width 2048, bfloat16) are read behind the block, and the `logging` consumer
gets them. Figures are microseconds a step: the CPU time of the engine's thread, which
delays the step; and of all threads, which run beside it but share its interpreter.
"""

import argparse
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm.config.capture import CaptureConfig
from vllm.v1.capture.channel import Inbox, ResultMessage
from vllm.v1.capture.plan import OPEN_END, CapturePlan, Reader, TapGroup
from vllm.v1.capture.rows import StepView
from vllm.v1.capture.wire import CaptureEnd
from vllm.v1.capture.worker import Stage, WorkerCapture

WIDTH, LAYERS, PROMPT = 2048, 16, 20
HOOKS = ("pre_attn", "post_attn", "post_block")
TAPS = [(layer, hook) for layer in range(LAYERS) for hook in HOOKS]
WAIT = 120.0


class Bench:
    """One worker's capture, and the front end that hears of its results."""

    def __init__(self) -> None:
        config: Any = SimpleNamespace(
            capture_config=CaptureConfig(consumers=["logging"]),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
            model_config=SimpleNamespace(served_model_name="m", model="m"),
            parallel_config=SimpleNamespace(data_parallel_index=0),
            use_v2_model_runner=False,
        )
        self.answered = 0
        self.inbox = Inbox(self._hear)
        device = torch.device("cpu")
        self.worker = WorkerCapture(
            config, Stage(0, 0, 1), TAPS, WIDTH, torch.bfloat16, device
        )

    def _hear(self, message: Any) -> None:
        self.answered += isinstance(message, ResultMessage)

    def run(self, name: str, layers: range, requests: int, steps: int) -> Any:
        """Decode; microseconds a step on the engine's thread, and on all threads."""
        ids = [f"{name}{number}" for number in range(requests)]
        ranges = ((PROMPT, OPEN_END),)
        taps = tuple((layer, "post_block") for layer in layers)
        group = TapGroup(taps, ranges, (Reader("logging", ranges),))
        for req_id in ids:
            plan = CapturePlan(req_id, PROMPT, (group,), self.inbox.address)
            self.worker.add_request(req_id, plan, list(range(PROMPT)), {})
        every, engine, answered = time.process_time(), 0.0, self.answered
        for step in range(steps):
            begin = time.thread_time()
            view = StepView(
                ids,
                np.full(requests, PROMPT + step),
                np.ones(requests, dtype=np.int64),
                np.arange(requests),
                requests,
            )
            self.worker.plan_step(view)
            self.worker.begin_step(requests)
            self.worker.end_step()
            engine += time.thread_time() - begin
            time.sleep(0.001)  # The GPU computes, and other threads have their turn.
        for req_id in ids:
            self.worker.end_request(
                CaptureEnd(
                    req_id,
                    self.inbox.address,
                    list(range(steps)),
                    0,
                    "length",
                    ["logging"],
                )
            )
        deadline = time.monotonic() + WAIT
        while self.answered < answered + requests and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.answered == answered + requests, "a result did not come"
        every = time.process_time() - every
        return {
            "engine_thread_us": round(engine / steps * 1e6, 1),
            "all_threads_us": round(every / steps * 1e6, 1),
        }

    def close(self) -> None:
        """Stop."""
        self.worker.close()
        self.inbox.close()


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench()
    report: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "requests": options.requests,
        "steps": options.steps,
    }
    for name, layers in (
        ("warm", range(1)),
        ("nothing", range(0)),
        ("one layer", range(8, 9)),
        ("all layers", range(LAYERS)),
    ):
        found = bench.run(name, layers, options.requests, options.steps)
        if name != "warm":
            report[name] = found
            print(f"{name:12s} {found}", flush=True)
    bench.close()
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
