# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.hostile.watcher URL PID`: asks `/health` until its input ends.

Prints a JSON list of `[seconds, owned, blocked]`: how long each request took, for how
much of it the process PID was running, and for how much it neither ran nor waited for a
processor. While this process or the main thread of PID waits for one, other threads of
PID run that delay nobody: such time is not owned. A process of its own: the tests'
process makes bodies of many megabytes, during which none of its threads runs.
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
    """Duration of one request, and the two parts of it, in seconds."""
    starved, used, begun = _starved(process.pid), _used(process), perf_counter()
    with urllib.request.urlopen(f"{url}/health", timeout=120) as reply:
        assert reply.status == 200, reply.status
        reply.read()
    took = perf_counter() - begun
    now = _starved(process.pid)
    waited = {
        thread: (ns - starved[thread]) / 1e9
        for thread, ns in now.items()
        if thread in starved
    }
    ran = _used(process) - used
    main = Path(f"/proc/{process.pid}/task/{process.pid}/schedstat")
    late = waited[OWN] + waited[main]
    blocked = max(took - ran - sum(waited.values()), 0.0)
    return took, max(min(took - late, ran), 0.0), blocked


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
