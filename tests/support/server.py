# SPDX-License-Identifier: Apache-2.0
"""A server of the OpenAI interface in a separate process."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

import psutil

START_SECONDS = float(os.environ.get("TEST_START_SECONDS", "180"))
ENVIRONMENT = {
    # The engine core still has its own process. The worker runs in it, as with one GPU,
    # which saves a third of the start-up time.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Servers run eagerly; only the sampler would compile something, for seconds.
    "TORCHDYNAMO_DISABLE": "1",
    # Tests read logs, and a test process may have another level for its own engines.
    "VLLM_LOGGING_LEVEL": "INFO",
}


OWN_WORKER = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
"""Environment of a server whose worker has its own process, the default on a CPU."""


SHORT: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 5,
    "temperature": 0.0,
    "ignore_eos": True,
}
"""Fields of a short request to a server that names its model so."""


class Reply(NamedTuple):
    """A response: its status, and its body as JSON (or as text)."""

    status: int
    body: Any


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class Server:
    """`vllm serve MODEL ARGUMENTS`; close it after use."""

    python = sys.executable
    """The Python whose vLLM is run."""
    program: tuple[str, ...] = ("-m", "vllm.entrypoints.cli.main", "serve")
    start_seconds = START_SECONDS

    def __init__(self, model: Path, *arguments: str, **environment: str) -> None:
        folder = tempfile.mkdtemp(prefix="server-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.log = Path(folder, "server.log")
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [self.python, *self.program, str(model)]
        command += ["--port", str(port), "--host", "127.0.0.1"]
        chosen = os.environ | ENVIRONMENT | environment
        with open(self.log, "w") as log:
            self._process = subprocess.Popen(
                [*command, *arguments], env=chosen, stdout=log, stderr=log
            )
        try:
            self._wait_until_it_answers()
        except BaseException:
            self.close()
            raise

    def _wait_until_it_answers(self) -> None:
        deadline = monotonic() + self.start_seconds
        while monotonic() < deadline:
            assert self._process.poll() is None, self.log.read_text()[-4000:]
            try:
                if self.get("/health").status == 200:
                    return
            except OSError:
                sleep(0.2)
        raise TimeoutError(self.log.read_text()[-4000:])

    @property
    def pid(self) -> int:
        """The id of the API server's process."""
        return self._process.pid

    def get(self, path: str) -> Reply:
        """The reply to GET."""
        return self.send(urllib.request.Request(self.url + path))

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        """The reply to POST with a JSON body."""
        return self.send(self._request(path, body, headers))

    def delete(self, path: str) -> Reply:
        """The reply to DELETE."""
        return self.send(urllib.request.Request(self.url + path, method="DELETE"))

    def stream(self, path: str, body: Any) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed reply."""
        request = self._request(path, body | {"stream": True}, {})
        with urllib.request.urlopen(request, timeout=120) as reply:
            for line in reply:
                text = line.decode().removeprefix("data: ").strip()
                if text and text != "[DONE]":
                    yield json.loads(text)

    def _request(
        self, path: str, body: Any, headers: dict[str, str]
    ) -> urllib.request.Request:
        return urllib.request.Request(
            self.url + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"} | headers,
        )

    def send(self, request: urllib.request.Request) -> Reply:
        """The reply to any request."""
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                status, raw = reply.status, reply.read()
        except urllib.error.HTTPError as error:
            status, raw = error.code, error.read()
        try:
            return Reply(status, json.loads(raw))
        except ValueError:
            return Reply(status, raw.decode(errors="replace"))

    def ends_within(self, seconds: float) -> bool:
        """Whether the server ends by itself."""
        try:
            self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Stop the server, and kill processes that do not stop in time."""
        children: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.pid).children(recursive=True)
        self._process.terminate()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for process in psutil.wait_procs(children, timeout=30)[1]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
