# SPDX-License-Identifier: Apache-2.0
"""Claim: the readouts of a decode step cost the engine's thread little.

    python benchmarks/readout_steps.py [--requests 32] [--steps 320] [--rounds 5]

Decode steps on a GPU wait for the engine's thread. This makes the calls of that thread
without a model and without the operations themselves: rows of width 8 are read out by
each request, as one probe or as a lens of four layers. `at the end` is a request whose
client reads the last output only, `each token` one that streams.

Figures are microseconds of CPU time per step, as the median and range over the rounds:
`worker` queues the operations (on a CPU they are computed there), `collect` takes their
results, and `scheduler` is the time to keep them by request and to encode what is sent.
"""

import argparse
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for `benchmarks`

from benchmarks.harness import reports  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.v1.capture.plan import OPEN_END  # noqa: E402
from vllm.v1.capture.staging.blocks import LocalGroup  # noqa: E402
from vllm.v1.capture.staging.step_layout import StepLayout  # noqa: E402
from vllm.v1.readouts.core.scheduler import ReadoutScheduling, take_parts  # noqa: E402
from vllm.v1.readouts.frontend.admission import staged_ranges  # noqa: E402
from vllm.v1.readouts.plan import Probe, Readout, ReadoutPlan  # noqa: E402
from vllm.v1.readouts.worker import worker  # noqa: E402
from vllm.v1.residual.step_view import StepView  # noqa: E402
from vllm.v1.serial_utils import MsgpackEncoder  # noqa: E402

WORK = ROOT / "build" / "benchmarks"
LAYERS, HIDDEN, VOCABULARY, PROMPT = 4, 8, 32, 5
EVERYTHING = ((0, OPEN_END),)
TAPS = tuple((layer, "post_block") for layer in range(LAYERS))
PROBE = Probe(np.ones(HIDDEN, np.float32).tobytes(), (0.0,))
READOUTS = {
    "one probe": Readout("p", "probe", TAPS[2:3], EVERYTHING, probe=PROBE),
    "lens of four layers": Readout("l", "lens", TAPS, EVERYTHING, top_k=5),
}
WHEN = {
    "each token": RequestOutputKind.DELTA,
    "at the end": RequestOutputKind.FINAL_ONLY,
}


class Model(nn.Module):
    """A head; its layers have no effect."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Identity() for _ in range(LAYERS))
        self.norm = nn.Identity()
        self.head = torch.randn(VOCABULARY, HIDDEN)

    def compute_logits(self, rows: torch.Tensor) -> torch.Tensor:
        """`[R, vocabulary]`."""
        return rows @ self.head.T


class Case:
    """Requests with the same readout, decoding one token per step."""

    def __init__(
        self, readout: Readout, when: RequestOutputKind, requests: int
    ) -> None:
        """Requests whose prompt is computed."""
        plan = ReadoutPlan((readout,))
        self._worker = _worker()
        self._layout = StepLayout(list(range(LAYERS)), requests * LAYERS)
        self._scheduling = ReadoutScheduling()
        self._requests = {
            f"r{n}": _request(f"r{n}", plan, when) for n in range(requests)
        }
        groups = tuple(
            LocalGroup((tap,), (TAPS.index(tap),), ranges, ())
            for tap, ranges in staged_ranges(plan).items()
        )
        for req_id, request in self._requests.items():
            self._layout.add(req_id, groups)
            self._worker.add_request(req_id, plan, groups, PROMPT)
            self._scheduling.add_request(request)
        self._staging = torch.randn(requests * LAYERS, HIDDEN)
        self._encoder = MsgpackEncoder()
        self._position = PROMPT

    def run(self, steps: int) -> dict[str, float]:
        """Microseconds per step."""
        spent = dict.fromkeys(("worker", "collect", "scheduler"), 0.0)
        names, count = list(self._requests), len(self._requests)
        for _ in range(steps):
            starts = np.full(count, self._position)
            view = StepView(names, starts, np.ones(count, int), count)
            placed = self._layout.place(view)
            clock = [time.thread_time()]
            self._worker.run(placed, view, self._staging, 0)
            pending = self._worker.take()
            clock.append(time.thread_time())
            assert pending is not None, "each request has a readout"
            found = pending.collect()
            clock.append(time.thread_time())
            for request in self._requests.values():
                request.num_tokens = self._position + 1
                self._scheduling.take(request, found, 1, [1])
            sent = [take_parts(request) for request in self._requests.values()]
            self._encoder.encode(sent)
            clock.append(time.thread_time())
            for name, begin, end in zip(spent, clock, clock[1:]):
                spent[name] += end - begin
            self._position += 1
        return {name: seconds / steps * 1e6 for name, seconds in spent.items()}


def _worker() -> worker.WorkerReadouts:
    sizes = SimpleNamespace(
        get_total_num_hidden_layers=lambda: LAYERS,
        get_hidden_size=lambda: HIDDEN,
        get_vocab_size=lambda: VOCABULARY,
    )
    alone = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
    config: Any = SimpleNamespace(model_config=sizes, parallel_config=alone)
    parts: Any = worker  # There are no process groups here.
    parts.get_pp_group = lambda: SimpleNamespace(rank_in_group=0)
    parts.get_tensor_model_parallel_rank = lambda: 0
    model, modules = Model(), SimpleNamespace()
    last, cpu = model.layers[-1], torch.device("cpu")
    return worker.WorkerReadouts(config, modules, model, last, cpu)  # type: ignore[arg-type]


def _request(req_id: str, plan: ReadoutPlan, when: RequestOutputKind) -> Any:
    capture = SimpleNamespace(readouts=plan)
    params = SimpleNamespace(_capture_plan=capture, output_kind=when, stop=[])
    return SimpleNamespace(
        request_id=req_id,
        sampling_params=params,
        resumable=False,
        is_finished=lambda: False,
        num_tokens=PROMPT,
        num_prompt_tokens=PROMPT,
    )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=WORK / "readout_steps.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    head = reports.begun()
    cases = {
        f"{what}, {label}": Case(readout, when, options.requests)
        for what, readout in READOUTS.items()
        for label, when in WHEN.items()
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for number in range(-1, options.rounds):  # the first one warms up
        for name, case in cases.items():
            costs = case.run(options.steps)
            if number >= 0:
                found[name].append(costs)
    report: dict[str, Any] = {
        **head,
        "requests": options.requests,
        "steps": options.steps,
        "rounds": options.rounds,
        "cases": {name: reports.summaries(costs) for name, costs in found.items()},
    }
    for name, parts in report["cases"].items():
        cells = (f"{part} {one['median']:.0f}" for part, one in parts.items())
        print(f"{name:32s} " + "  ".join(cells))
    reports.write(report, options.out)


if __name__ == "__main__":
    main()
