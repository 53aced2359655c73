# SPDX-License-Identifier: Apache-2.0
"""Folders of dead processes are removed, and no others."""

import fcntl
import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from vllm.v1.capture.consumers.storage import folder_lock
from vllm.v1.capture.consumers.storage.files import Workspace


def hold(root: Path, pid: int, told: Connection) -> None:
    """Keep a workspace with a file, as in a container beside this one.

    It has the same name, and any process id.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: "same")
        patch.setattr(os, "getpid", lambda: pid)
        workspace = Workspace(root)
        workspace.open()
        workspace.create()
        told.send(workspace.own)
        signal.pause()


class Owner:
    """Another process with a workspace below a root."""

    def __init__(self, root: Path, pid: int) -> None:
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()
        self.process = context.Process(target=hold, args=(root, pid, there))
        self.process.start()
        self.folder: Path = here.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    # No process of this machine has the number.
    owner = Owner(tmp_path, 999_999_999)
    yield owner
    owner.kill()


def started(root: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.setattr("socket.gethostname", lambda: "same")
    workspace = Workspace(root)
    workspace.open()
    return workspace


def test_another_container_of_the_same_name_keeps_its_files(
    owner: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = started(tmp_path, monkeypatch)
    assert (owner.folder / "0.part").exists()
    workspace.close()
    assert (owner.folder / "0.part").exists()


def test_what_a_killed_process_left_is_removed_though_its_number_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Owner(tmp_path, os.getpid())
    owner.kill()
    assert (owner.folder / "0.part").exists()
    workspace = started(tmp_path, monkeypatch)
    assert not owner.folder.exists()
    workspace.close()
    assert not list(tmp_path.iterdir())


def test_a_workspace_of_the_same_process_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = started(tmp_path, monkeypatch)
    path, file = first.create()
    os.close(file)
    started(tmp_path, monkeypatch).close()
    assert os.path.exists(path)
    first.close()
    assert not list(tmp_path.iterdir())


def test_without_locks_nothing_of_others_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, how: int) -> None:
        raise OSError("no locks here")

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", refuse)
        first = started(tmp_path, patched)
        second = started(tmp_path, patched)
        assert first.own.exists()
        second.close()
    first.close()


def test_a_link_in_the_place_of_a_lock_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, precious = tmp_path / ".incomplete", tmp_path / "precious"
    parent.mkdir()
    precious.write_text("mine")
    (parent / f"x{folder_lock.SUFFIX}").symlink_to(precious)
    (parent / "y").mkdir()
    started(tmp_path, monkeypatch).close()
    assert precious.read_text() == "mine" and (parent / "y").exists()
