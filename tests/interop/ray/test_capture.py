# SPDX-License-Identifier: Apache-2.0
"""`vllm capture --ray`: engines of a cluster write the data set of one engine."""

import json
import multiprocessing
import multiprocessing.process
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

import psutil
import pytest

from tests.capture_dataset._collecting import (
    ROOT,
    FakeRunner,
    collected,
    contents,
    planned,
    write_source,
)
from tests.interop.ray.conftest import PATIENCE_SECONDS, node
from tests.multiprocess.apart import ON_CPU
from tests.support.waiting import until
from vllm.capture_dataset import load_dataset, ray_cluster
from vllm.capture_dataset.collect import collect
from vllm.capture_dataset.manifest import NAME, Manifest
from vllm.capture_dataset.progress import Progress
from vllm.capture_dataset.ray_cluster import RayRunner
from vllm.capture_dataset.runners import CaptureRunError, failed
from vllm.v1.capture.errors import CaptureValidationError

pytestmark = [pytest.mark.interop, pytest.mark.timeout(3000)]

MODEL = ROOT / "examples/demo_model/weights"
SHARD_BYTES = 16_000


@pytest.fixture
def cluster(head: tuple[str, int]) -> str:
    """Its address."""
    return head[0]


class SlowRunner(FakeRunner):
    """Runs slowly, so that there is time to stop it."""

    def run(self, *arguments: Any) -> Iterator[Any]:
        for item in super().run(*arguments):
            sleep(0.01)
            yield item


class FailingRunner(FakeRunner):
    """Cannot capture one of the prompts."""

    def run(self, prompts: Any, *others: Any) -> Iterator[Any]:
        for prompt in prompts:
            if prompt.entry.sample == 150:
                raise failed(prompt, "it is meant to")
        return super().run(prompts, *others)


class OtherRunner(FakeRunner):
    """Has another model in each process but that of the first engine."""

    def __init__(self) -> None:
        super().__init__()
        if "_Writer" in "".join(psutil.Process().cmdline()):
            self.model = replace(self.model, weights="another")


def written(
    cluster: str,
    source: Path,
    out: Path,
    kind: type[FakeRunner] = SlowRunner,
    **chosen: Any,
) -> Manifest:
    """Collect as the command does."""
    runner = RayRunner(cluster, 2, kind, 1, out)
    try:
        chosen = {"shard_bytes": SHARD_BYTES, **chosen}
        plan = planned(source, out, runner, **chosen)  # type: ignore[arg-type]
        return collect(plan, runner, Progress(1, disable=True))
    finally:
        runner.close()


def resume(cluster: str, source: Path, out: Path) -> None:
    written(cluster, source, out, resume=True)


def shards_of(out: Path) -> int:
    return len(Manifest.read(out).shards) if (out / NAME).is_file() else 0


def engines(head: int) -> list[psutil.Process]:
    """The processes of a cluster's actors that write shards."""
    every = psutil.Process(head).children(recursive=True)
    return [one for one in every if "_Writer" in "".join(one.cmdline())]


def test_several_engines_write_each_shard_once_whatever_is_killed(
    head: tuple[str, int], tmp_path: Path
) -> None:
    cluster, process = head
    source = write_source(tmp_path, count=1000)
    whole, out = tmp_path / "whole", tmp_path / "parts"
    expected = collected(source, whole, shard_bytes=SHARD_BYTES)
    context = multiprocessing.get_context("spawn")

    def began() -> "multiprocessing.process.BaseProcess":
        child = context.Process(target=resume, args=(cluster, source, out))
        done = shards_of(out)
        child.start()
        until(lambda: shards_of(out) > done or not child.is_alive(), PATIENCE_SECONDS)
        assert child.is_alive()
        return child

    command = began()
    command.kill()
    command.join()
    load_dataset(out).verify()
    assert 0 < shards_of(out) < len(expected.shards)

    command = began()
    until(lambda: len(engines(process)) == 2, PATIENCE_SECONDS)
    engines(process)[0].kill()
    command.join(PATIENCE_SECONDS)
    assert command.exitcode == 0
    manifest = Manifest.read(out)
    assert manifest.complete and manifest.shards == expected.shards
    assert contents(out) == contents(whole)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (FailingRunner, "p-150.* could not be captured: it is meant to"),
        (OtherRunner, "node .* has another model .*another.* copy one checkpoint"),
    ],
)
def test_what_fails_in_an_engine_ends_the_command(
    cluster: str, tmp_path: Path, kind: type[FakeRunner], said: str
) -> None:
    source, out = write_source(tmp_path, count=200), tmp_path / "out"
    with pytest.raises(CaptureRunError, match=f"(?s){said}"):
        written(cluster, source, out, kind)
    assert not Manifest.read(out).complete


@pytest.mark.e2e
def test_the_command_writes_the_data_set_of_one_engine(
    cluster: str, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    prompts = [[20 + i, 30, 40 + 2 * i, *range(50, 50 + i)] for i in range(40)]
    source.write_text("\n".join(json.dumps({"prompt": one}) for one in prompts))
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "capture"]
    command += [str(source), "--model", str(MODEL), "--layers", "1,4"]
    command += ["--shard-size", "100K", "--enforce-eager", "--dtype", "float32"]
    command += ["--gpu-memory-utilization", "0.1", "--readout", "norm"]
    for name, options in {"one": [], "ray": ["--ray", cluster]}.items():
        done = subprocess.run(
            [*command, "--out", str(tmp_path / name), *options],
            cwd=ROOT,
            env=os.environ | ON_CPU,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-6000:]
        assert "40 prompts" in done.stdout
    assert shards_of(tmp_path / "one") > 3
    assert contents(tmp_path / "ray") == contents(tmp_path / "one")


def unopened() -> Any:
    raise AssertionError("no engine must be started")


def connect(cluster: str, folder: Path | None, engines: int | None = None) -> None:
    """Connect as the command does, which is refused before an engine starts."""
    try:
        RayRunner(cluster, engines, unopened, 1, folder)
    finally:
        import ray

        ray.shutdown()


def test_more_engines_than_there_is_room_for_are_refused(cluster: str) -> None:
    with pytest.raises(CaptureValidationError, match=r"room for 4 .* not for 9"):
        connect(cluster, None, 9)


def test_a_node_with_another_version_is_refused(
    cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "__version__", "0.0.1")
    said = r"node \S+ \(\S+\) has vllm .*, and this machine vllm 0.0.1; install"
    with pytest.raises(CaptureValidationError, match=said):
        connect(cluster, None)


def test_a_folder_that_a_node_does_not_share_is_refused(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The mark is written into a folder that the other process does not see.
    elsewhere = tmp_path / "elsewhere"
    monkeypatch.setattr(Path, "touch", lambda _: elsewhere.write_text(""))
    monkeypatch.setattr(Path, "unlink", lambda _: None)
    with pytest.raises(CaptureValidationError, match="is another folder on node"):
        connect(cluster, tmp_path / "out")


def test_a_cluster_that_is_not_there_is_refused() -> None:
    with pytest.raises(CaptureValidationError, match="no cluster answers at"):
        connect("127.0.0.1:1", None)


NO_VLLM = """
import importlib.metadata as metadata

found = metadata.version

def version(name):
    if name == "vllm":
        raise metadata.PackageNotFoundError(name)
    return found(name)

metadata.version = version
"""


def test_a_node_without_the_fork_is_refused(cluster: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_VLLM)
    options = [f"--address={cluster}", "--num-cpus=1"]
    said = r"node \S+ \(\S+\) has no vllm, and this machine vllm .*; install the same"
    with (
        node(options, tmp_path / "log", [str(tmp_path), *sys.path]),
        pytest.raises(CaptureValidationError, match=said),
    ):
        connect(cluster, None)
