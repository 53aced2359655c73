# SPDX-License-Identifier: Apache-2.0
"""Data sets of runs that are killed at random moments can be completed."""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.capture_dataset._collecting import (
    FakeRunner,
    collected,
    contents,
    write_source,
)
from vllm.capture_dataset import load_dataset
from vllm.capture_dataset.manifest import NAME, Manifest

KILLS = 3


class SlowRunner(FakeRunner):
    """Runs slowly, so that there is time to kill it."""

    def run(self, *arguments: Any) -> Iterator[Any]:
        for item in super().run(*arguments):
            time.sleep(0.004)
            yield item


def go_on(source: Path, out: Path) -> None:
    collected(source, out, SlowRunner(), resume=True)


def shards_of(out: Path) -> int:
    """Number of complete shards; 0 before there is a manifest."""
    return len(Manifest.read(out).shards) if (out / NAME).is_file() else 0


def until(out: Path, before: int, alive: Callable[[], bool]) -> None:
    """Wait until more shards are complete than before."""
    while shards_of(out) <= before and alive():
        time.sleep(0.002)


def test_runs_that_are_killed_leave_the_files_of_one_that_was_not(
    tmp_path: Path,
) -> None:
    source = write_source(tmp_path, count=90)
    collected(source, tmp_path / "whole")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.capture_dataset.test_kills"])
    chance, out, killed = random.Random(25), tmp_path / "parts", 0
    for _ in range(KILLS):
        before = shards_of(out)
        child = context.Process(target=go_on, args=(source, out))
        child.start()
        # A random moment after writing has begun.
        until(out, before, child.is_alive)
        time.sleep(chance.uniform(0, 0.05))
        killed += child.is_alive()
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
        if shards_of(out):
            load_dataset(out).verify()
    assert killed == KILLS, "the runs ended by themselves"
    assert not Manifest.read(out).complete
    collected(source, out, resume=True)
    assert contents(out) == contents(tmp_path / "whole")
