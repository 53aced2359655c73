# SPDX-License-Identifier: Apache-2.0
"""A name locked by one process is locked for its siblings, not for others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm.v1.capture.frontend.path_locks import (
    NoOtherServers,
    OtherServers,
    other_servers,
)

NAME = ("files", "tag", "request")
SIBLING = """
import sys
from vllm.v1.capture.frontend.path_locks import OtherServers
servers = OtherServers(int(sys.argv[1]))
print(servers.take(("files", "tag", "request")), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))


def test_names_are_taken_freed_and_left_behind() -> None:
    mine = OtherServers(7)
    assert mine.take(NAME) and mine.take(NAME)
    assert mine.take(("files", "tag", "other"))
    command = [sys.executable, "-c", SIBLING, "7"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "False\n"
        first.communicate("")
    mine.free(NAME)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as second:
        assert second.stdout is not None
        assert second.stdout.readline() == "True\n"
        assert not mine.take(NAME)
        assert OtherServers(8).take(NAME), "a server that was started apart"
        second.kill()
        second.wait()
    assert mine.take(NAME), "a process that died has no names"


def test_a_server_of_one_process_shares_no_locks(tmp_path: Path) -> None:
    alone = other_servers(1)
    assert type(alone) is NoOtherServers and alone.take(NAME)
    alone.free(NAME)
    assert not list(tmp_path.iterdir())
    several = other_servers(2)
    assert isinstance(several, OtherServers)
    assert several._server == os.getppid()
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
