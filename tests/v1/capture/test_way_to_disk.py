# SPDX-License-Identifier: Apache-2.0
"""A row passes few files, queues and threads on its way from a tap to a file."""

import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

import vllm
from benchmarks.harness.worker_alone import WorkerAlone
from vllm.v1.residual.spans import OPEN_END

ROOT = Path(vllm.__file__).parent
TAP = {
    "v1/worker/residual_stream.py",
    "model_executor/layers/residual/tap.py",
    "model_executor/layers/residual/point.py",
    "model_executor/layers/residual/capture_op.py",
}
"""What a worker without a model does not run."""
MOST_FILES, MOST_THREADS = 30, 7
OTHER_WAYS = (
    "v1/capture/transport/",
    "v1/capture/results.py",
    "v1/capture/worker/stats_reporter.py",
)
"""Results and counters go to the front end; no row does."""
WATCHING = {"capture-filesystem-clock", "capture-report"}
"""Threads that handle no rows: for time-outs, and for counters."""
SOME = ("staging/ring", "dispatch/request", "delivery/packet_queue")
LAYERS, WIDTH, PROMPT, GENERATED = 4, 512, 64, 200


@contextmanager
def traced() -> Iterator[dict[str, set[str]]]:
    """The threads that run code of each of our files, while the block runs."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    ours = f"{ROOT}/v1/capture/", f"{ROOT}/v1/residual/"

    def note(frame: FrameType, event: str, arg: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(ours):
            thread = threading.current_thread().name
            found[name.removeprefix(f"{ROOT}/")].add(thread)

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]


def write(worker: WorkerAlone, *names: str) -> None:
    """Two requests with a prompt and generated tokens, until their files exist."""
    taps = [(layer, "post_block") for layer in range(LAYERS)]
    worker.open(names, PROMPT, taps, (0, OPEN_END))
    for name in names:
        worker.step([name], 0, PROMPT)
    for position in range(PROMPT, PROMPT + GENERATED):
        worker.step(names, position, 1)
    worker.end(names, GENERATED + 1)
    worker.answers(len(names))


def test_from_a_tap_to_a_file(tmp_path: Path) -> None:
    consumer = f"filesystem:root={tmp_path},buffer_bytes=100000000"
    others = set(threading.enumerate())
    with traced() as found:
        worker = WorkerAlone(consumer, LAYERS, WIDTH, torch.device("cpu"))
        write(worker, "a", "b")
        found.clear()  # What happens once is no part of the way.
        write(worker, "c", "d")
        threads = {one.name for one in set(threading.enumerate()) - others}
        way = {name: by - WATCHING for name, by in found.items()}
        worker.close()
    assert len(list(tmp_path.glob("default/*/*.bin"))) == 4 * LAYERS
    passed = TAP | {
        name for name, by in way.items() if by and not name.startswith(OTHER_WAYS)
    }
    assert {f"v1/capture/{name}.py" for name in SOME} < passed
    assert len(passed) <= MOST_FILES, sorted(passed)
    threads -= {"capture-inbox"}  # of the front end
    assert len(threads | {"engine"}) <= MOST_THREADS, sorted(threads)
