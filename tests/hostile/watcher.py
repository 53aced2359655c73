# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.hostile.watcher URL PID`: asks `/health` until its input ends.

Prints a JSON list of `[seconds, cpu_seconds]`: how long each request took, and how much
processor time the process PID used meanwhile. A process of its own: the tests' process
makes bodies of many megabytes, during which none of its threads runs.
"""

import json
import select
import sys
import urllib.request
from time import perf_counter

import psutil

PAUSE = 0.002


def ask(url: str, process: psutil.Process) -> tuple[float, float]:
    """Duration of one request, and the server's processor time, in seconds."""
    used, begun = _used(process), perf_counter()
    with urllib.request.urlopen(f"{url}/health", timeout=120) as reply:
        assert reply.status == 200, reply.status
        reply.read()
    return perf_counter() - begun, _used(process) - used


def _used(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


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
