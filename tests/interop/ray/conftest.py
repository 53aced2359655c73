# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster on this machine."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.interop.ray.slots import SLOT
from tests.support.waiting import until

PATIENCE_SECONDS = 600


@contextmanager
def node(options: list[str], log: Path, path: list[str]) -> Iterator[int]:
    """A node of a cluster; yields its process.

    Args:
        options: of `ray start`.
        log: a file for what it prints.
        path: folders in which its processes look for modules.

    """
    command = [Path(sys.executable).with_name("ray"), "start", "--block", *options]
    command += ["--num-gpus=0", "--disable-usage-stats"]
    command += [f"--object-store-memory={200 << 20}", "--node-ip-address=127.0.0.1"]
    with log.open("wb") as opened:
        process = subprocess.Popen(
            command,
            stdout=opened,
            stderr=opened,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
        )
    try:
        until(
            lambda: (
                b"Ray runtime started" in log.read_bytes() or process.poll() is not None
            ),
            PATIENCE_SECONDS,
        )
        assert process.poll() is None, log.read_text()
        yield process.pid
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """A cluster of this machine, with room for four engines: address and process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["--head", f"--port={port}", "--num-cpus=4"]
    command += [f'--resources={{"{SLOT}": 4}}', "--include-dashboard=false"]
    with node(command, tmp_path_factory.mktemp("cluster") / "log", sys.path) as head:
        yield f"127.0.0.1:{port}", head
