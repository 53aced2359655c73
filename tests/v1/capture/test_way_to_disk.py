# SPDX-License-Identifier: Apache-2.0
"""A row passes few files, queues and threads on its way to a file or to the caller."""

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
    "model_executor/layers/residual/capture_op.py",
}
"""What a worker without a model does not run."""
MOST_FILES, MOST_THREADS = 24, 7
MOST_FILES_TO_THE_CALLER = 20
OTHERS = (
    "v1/capture/worker/stats_reporter.py",
    "v1/capture/transport/zmq_channel.py",
    "v1/capture/transport/borrower.py",
)
"""What also runs while a row is on its way to the caller, and handles none: counters,
and what waits for messages of other processes."""
OTHER_WAYS = (
    "v1/capture/transport/",
    "v1/capture/results.py",
    "v1/capture/worker/stats_reporter.py",
    "v1/residual/plain_data.py",
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


def files_on(found: dict[str, set[str]], other_ways: tuple[str, ...]) -> set[str]:
    """The files that a row has passed."""
    way = {name for name, by in found.items() if by - WATCHING}
    passed = TAP | {name for name in way if not name.startswith(other_ways)}
    assert {f"v1/capture/{name}.py" for name in SOME} < passed
    return passed


def test_from_a_tap_to_a_file(tmp_path: Path) -> None:
    consumer = f"filesystem:root={tmp_path},buffer_bytes=100000000"
    others = set(threading.enumerate())
    with traced() as found:
        worker = WorkerAlone(consumer, LAYERS, WIDTH, torch.device("cpu"))
        write(worker, "a", "b")
        found.clear()  # What happens once is no part of the way.
        write(worker, "c", "d")
        threads = {one.name for one in set(threading.enumerate()) - others}
        passed = files_on(found, OTHER_WAYS)
        worker.close()
    assert len(list(tmp_path.glob("default/*/*.bin"))) == 4 * LAYERS
    assert len(passed) <= MOST_FILES, sorted(passed)
    threads -= {"capture-inbox"}  # of the front end
    assert len(threads | {"engine"}) <= MOST_THREADS, sorted(threads)


def test_from_a_tap_to_the_caller() -> None:
    with traced() as found:
        worker = WorkerAlone("inline", LAYERS, WIDTH, torch.device("cpu"))
        write(worker, "a", "b")
        found.clear()
        write(worker, "c", "d")
        passed = files_on(found, OTHERS)
        worker.close()
    assert len(passed) <= MOST_FILES_TO_THE_CALLER, sorted(passed)
