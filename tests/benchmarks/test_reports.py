# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from benchmarks.harness import reports

DRIVER = """#!/bin/sh
case "$*" in
  *"--id 2,0"*) echo 2048; echo 1024 ;;
  *--id*) exit 1 ;;
  *) echo 1024; echo 512 ;;
esac
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with GPUs, whose memory usage the stand-in for nvidia-smi reports."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(DRIVER)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("driver")
def test_memory_is_that_of_the_first_gpu_that_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert reports.gpu_memory_gib() == 1.0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert reports.gpu_memory_gib() == 2.0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    assert reports.gpu_memory_gib() is None


def test_a_machine_without_a_gpu_has_no_memory_to_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    assert reports.gpu_memory_gib() is None


def test_an_engines_log_says_what_its_start_took() -> None:
    log = """
    Model loading took 2.3 GiB memory and 1.5 seconds
    Graph capturing finished in 3 secs, took 0.20 GiB
    Graph capturing finished in 7 secs, took 0.31 GiB
    GPU KV cache size: 1,234,567 tokens, 1 group
    """
    assert reports.engine_facts(log) == {
        "graph_seconds": 7,
        "graph_gib": 0.31,
        "weights_gib": 2.3,
        "kv_cache_tokens": 1234567,
    }


def test_pages_link_every_committed_result() -> None:
    folder = reports.ROOT / "benchmarks"
    pages = [*folder.rglob("*.md"), *(reports.ROOT / "docs").rglob("*.md")]
    text = "".join(page.read_text() for page in pages)
    results = list((folder / "results").iterdir())
    assert results and not [one.name for one in results if one.name not in text]
