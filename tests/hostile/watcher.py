# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.hostile.watcher URL PID`: asks `/health` until its input ends.

Prints a JSON list of `[seconds, cpu_seconds, starved_seconds]`: how long each request
took, how much processor time the process PID used meanwhile, and how long its threads
and this process waited for a processor. A process of its own: the tests' process makes
bodies of many megabytes, during which none of its threads runs.
"""

import json
import select
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path
from time import perf_counter

import psutil

PAUSE = 0.002
OWN = Path("/proc/self/schedstat")


def ask(url: str, process: psutil.Process) -> tuple[float, float, float]:
    """Duration of one request, and the two times, in seconds."""
    starved, used, begun = _starved(process.pid), _used(process), perf_counter()
    with urllib.request.urlopen(f"{url}/health", timeout=120) as reply:
        assert reply.status == 200, reply.status
        reply.read()
    took = perf_counter() - begun
    now = _starved(process.pid)
    waited = sum(
        ns - starved[thread] for thread, ns in now.items() if thread in starved
    )
    return took, _used(process) - used, waited / 1e9


def _used(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _starved(pid: int) -> dict[Path, int]:
    """Nanoseconds that each thread has waited for a processor, see proc(5)."""
    found = {}
    for file in (*Path(f"/proc/{pid}/task").glob("*/schedstat"), OWN):
        with suppress(OSError):  # The thread has ended.
            found[file] = int(file.read_text().split()[1])
    return found


def main() -> None:
    url, pid = sys.argv[1:]
    process = psutil.Process(int(pid))
    ask(url, process)
    print("ready", flush=True)
    waits = []
    while not select.select([sys.stdin], [], [], PAUSE)[0]:
        waits.append(ask(url, process))
    print(json.dumps(waits), flush=True)


if __name__ == "__main__":
    main()
