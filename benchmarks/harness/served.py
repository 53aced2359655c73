# SPDX-License-Identifier: Apache-2.0
"""Servers that are measured over HTTP."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import httpx

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Threads are not pinned: a server bound to one core would compete with other
    # programs there.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
START_SECONDS = 400.0


class Server:
    """`vllm serve` in its own process group; must be closed after use."""

    def __init__(
        self,
        model: Path,
        log: Path,
        arguments: list[str],
        threads: int,
        python: Path = Path(sys.executable),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start the server; `python` and `environment` select the vLLM."""
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = int(taken.getsockname()[1])
        self.log = log
        self.url = f"http://127.0.0.1:{port}"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [str(python), "-m", "vllm.entrypoints.cli.main", "serve"]
        command += [str(model), "--served-model-name", "m"]
        command += ["--host", "127.0.0.1", "--port", str(port), *arguments]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                env={
                    **os.environ,
                    **ENVIRONMENT,
                    **({"OMP_NUM_THREADS": str(threads)} if threads else {}),
                    **environment,
                },
                start_new_session=True,
            )
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(base_url=self.url, timeout=600, limits=limits)

    async def ready(self) -> None:
        """Wait until the server answers.

        Raises:
            RuntimeError: the server ended or did not answer in time.
        """
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                if (await self._client.get("/health")).status_code == 200:
                    return
            except httpx.TransportError:
                await asyncio.sleep(0.5)
        raise RuntimeError(f"the server did not start; see {self.log}")

    async def get(self, path: str) -> Any:
        """The response to a GET request."""
        answer = await self._client.get(path)
        answer.raise_for_status()
        return answer.json()

    async def __aenter__(self) -> "Server":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.aclose()
        with suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
