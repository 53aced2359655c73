# SPDX-License-Identifier: Apache-2.0
"""The memory that each process of a server uses, as its allocators count it.

Resident memory also has the pages that an allocator keeps from the busiest moment, in
each thread's arena: they grow by tens of MiB over thousands of requests while the
memory in use stays the same.
"""

import json
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from tests.support.plugins import install
from tests.support.server import Server

PLUGIN = "memory_reporter"
SOURCE = r"""
import ctypes
import gc
import json
import os
import socket
import sys
import threading


class Info(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]


def measured():
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Info
    info = mallinfo2()
    return {"bytes": info.uordblks + info.hblkhd, "blocks": sys.getallocatedblocks()}


def answer(listening):
    names = {}
    while True:
        asking, _ = listening.accept()
        with asking:
            exec(asking.recv(4096).decode(), names)
            asking.sendall(json.dumps(measured()).encode())


def start():
    listening = socket.socket(socket.AF_UNIX)
    listening.bind("\0clearbox-memory-%d" % os.getpid())
    listening.listen()
    threading.Thread(target=answer, args=(listening,), daemon=True).start()
"""
"""A plug-in of upstream's group for all processes, for glibc 2.33 or later.

It answers on an abstract socket, whose name, unlike a path, cannot be too long.
"""


@dataclass(frozen=True, slots=True)
class Used:
    """The memory that all processes of a server use together."""

    bytes: int
    """Allocated from the system's allocator: tensors, buffers and large objects."""
    blocks: int
    """Small objects of Python, of at most 512 bytes each."""


def add_reporter(folder: Path) -> dict[str, str]:
    """Install the plug-in; returns the environment of servers that load it."""
    target = f"{PLUGIN}:start"
    install(folder, PLUGIN, SOURCE, group="vllm.general_plugins", memory=target)
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def used(server: Server) -> Used:
    """The memory in use now by a server with the environment of `add_reporter`."""
    return run_in(server, "pass")


def run_in(server: Server, source: str) -> Used:
    """Execute Python of at most 4 KiB in each process; returns the memory in use."""
    parent = psutil.Process(server.pid)
    found = []
    for process in (parent, *parent.children(recursive=True)):
        # Helpers of the standard library do not load plug-ins.
        with suppress(ConnectionRefusedError):
            found.append(_ask(process.pid, source))
    assert len(found) >= 2, "the API server and the engine core answer"
    return Used(sum(one.bytes for one in found), sum(one.blocks for one in found))


def _ask(pid: int, source: str) -> Used:
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(60)
        asking.connect(f"\0clearbox-memory-{pid}")
        asking.sendall(source.encode())
        return Used(**json.loads(asking.recv(1024)))


def growth(samples: Sequence[Used]) -> Used:
    """The growth from the first to the last samples, by the medians of three."""
    first, last = samples[:3], samples[-3:]
    return Used(
        round(median(s.bytes for s in last) - median(s.bytes for s in first)),
        round(median(s.blocks for s in last) - median(s.blocks for s in first)),
    )
