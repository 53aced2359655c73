# SPDX-License-Identifier: Apache-2.0
"""Data sets of runs that are killed at random moments can be completed."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.capture_dataset._collecting import (
    ROOT,
    FakeRunner,
    collected,
    contents,
    write_source,
)
from vllm.capture_dataset import load_dataset
from vllm.capture_dataset.manifest import NAME, Manifest

KILLS = 10
QUICK_KILLS = 3
MODEL = ROOT / "examples/demo_model/weights"


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
    for _ in range(QUICK_KILLS):
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
    assert killed == QUICK_KILLS, "the runs ended by themselves"
    assert not Manifest.read(out).complete
    collected(source, out, resume=True)
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_an_engine_killed_ten_times_leaves_every_row_once(tmp_path: Path) -> None:
    chance, source = random.Random(5), tmp_path / "prompts.jsonl"
    prompts = [[chance.randrange(300) for _ in range(64)] for _ in range(3000)]
    lines = [json.dumps({"prompt": one, "label": i}) for i, one in enumerate(prompts)]
    source.write_text("\n".join(lines))

    def start(out: Path) -> subprocess.Popen[bytes]:
        words = [str(source), "--model", str(MODEL), "--out", str(out), "--resume"]
        words += ["--layers", "1,4", "--carry", "label", "--shard-size", "1M"]
        words += ["--enforce-eager", "--dtype", "float32"]
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "capture"]
        with (tmp_path / "log").open("ab") as log:
            return subprocess.Popen([*command, *words], stdout=log, stderr=log)

    assert start(tmp_path / "whole").wait() == 0, (tmp_path / "log").read_text()[-4000:]
    out = tmp_path / "parts"
    for _ in range(KILLS):
        before, running = shards_of(out), start(out)
        until(out, before, lambda child=running: child.poll() is None)  # type: ignore[misc]
        time.sleep(chance.uniform(0, 1.5))
        assert running.poll() is None, (tmp_path / "log").read_text()[-4000:]
        running.kill()
        running.wait()
    assert not Manifest.read(out).complete
    assert start(out).wait() == 0
    assert sorted_rows(out) == sorted_rows(tmp_path / "whole")
    assert contents(out) == contents(tmp_path / "whole")


def sorted_rows(folder: Path) -> Any:
    """All rows of a data set, in an order that does not depend on the files."""
    table = pq.read_table([str(path) for path in sorted(folder.glob("*.parquet"))])
    keys = [(name, "ascending") for name in ("layer", "sample", "position")]
    return table.replace_schema_metadata(None).sort_by(keys)
