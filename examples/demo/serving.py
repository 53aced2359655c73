# SPDX-License-Identifier: Apache-2.0
"""Runs a `vllm serve` process, and stops it in any case."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

HOST = "127.0.0.1"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # the model is a folder; nothing may be downloaded
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; a small model needs less
}


class ServerFailure(Exception):
    """The server did not become ready."""


def free_port(wanted: int) -> int:
    """The port `wanted` if nothing listens there, otherwise a free port."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise ServerFailure("this machine gives out no free port")


def serve_command(port: int, arguments: Sequence[str]) -> list[str]:
    """The command line of `vllm serve`, with this process's Python."""
    program = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
    return [*program, *arguments, "--host", HOST, "--port", str(port)]


@contextmanager
def running(
    command: Sequence[str],
    url: str,
    log: Path,
    timeout: float,
    show: Callable[[float, str], None],
    environment: Mapping[str, str] = ENVIRONMENT,
) -> Iterator[None]:
    """Start a server, wait until it is healthy, and stop it at the end.

    Args:
        command: the server's program and arguments.
        url: base URL, at which `/health` answers.
        log: the file that the server's output goes to.
        timeout: seconds until it must be healthy.
        show: called about once a second with the seconds that have passed and the
            log so far.
        environment: variables on top of this process's.

    Raises:
        ServerFailure: it ended or did not answer; the message has the end of its log.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            # A separate process group: the server's workers are stopped with it, and
            # Ctrl-C reaches only this process, which then stops the server in order.
            start_new_session=True,
        )
    try:
        _wait_until_healthy(process, url, log, timeout, show)
        yield
    finally:
        stop(process)


def stop(process: "subprocess.Popen[bytes]", patience: float = 20.0) -> None:
    """Ask the process group to terminate; kill it after `patience` seconds."""
    for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 5.0)):
        _signal_group(process, number)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
        break
    _signal_group(process, signal.SIGKILL)  # a worker that outlived its server


def _signal_group(process: "subprocess.Popen[bytes]", number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _wait_until_healthy(
    process: "subprocess.Popen[bytes]",
    url: str,
    log: Path,
    timeout: float,
    show: Callable[[float, str], None],
) -> None:
    start = time.monotonic()
    while (passed := time.monotonic() - start) < timeout:
        if process.poll() is not None:
            raise ServerFailure(
                f"the server ended with status {process.returncode} after "
                f"{passed:.0f} s. {_end_of(log)}"
            )
        if _is_healthy(url):
            return
        show(passed, log.read_text(errors="replace"))
        time.sleep(1)
    raise ServerFailure(
        f"the server was not ready within {timeout:.0f} s. {_end_of(log)}"
    )


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def _end_of(log: Path, lines: int = 15) -> str:
    written = log.read_text(errors="replace").splitlines()
    last = "\n".join([line for line in written if line.strip()][-lines:])
    return f"Its last lines:\n{last}\nAll of them: {log}"
