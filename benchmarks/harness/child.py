# SPDX-License-Identifier: Apache-2.0
"""A child process with the environment of another vLLM, driven by lines of JSON.

Each request and each answer is one line of JSON. Output of libraries in the process is
redirected to its log, so that stdout has only answers.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

STOP_SECONDS = 60.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the process itself
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Threads are not pinned: a process bound to one core would compete with other
    # programs there.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Environment of processes with an engine, for GPU and CPU."""


class Child:
    """The parent's side of a child process."""

    def __init__(
        self,
        command: Sequence[str | Path],
        log: Path,
        environment: Mapping[str, str],
        folder: Path | None = None,
    ) -> None:
        """Start it.

        Args:
            command: the command, which must use `answers` and `requests`.
            log: the file for its output.
            environment: the complete environment.
            folder: the working directory; by default the parent's.

        """
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                cwd=folder,
                env=dict(environment),
                text=True,
                bufsize=1,
            )

    def ask(self, request: Any) -> Any:
        """Send one request and return the answer.

        Raises:
            RuntimeError: the process ended; its log says why.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # reported by the missing answer
            self._process.stdin.write(json.dumps(request) + "\n")
        return self.answer()

    def answer(self) -> Any:
        """Read the next answer, for example the one sent when the process is ready.

        Raises:
            RuntimeError: the process ended; its log says why.

        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended; see {self.log}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended by itself
            self._process.stdin.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def answers() -> Callable[[Any], None]:
    """The child's side: return a function that sends answers; redirect stdout."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(what: Any) -> None:
        lines.write(json.dumps(what) + "\n")

    return answer


def requests() -> Iterable[Any]:
    """The child's side: yield requests until the parent closes the pipe."""
    return (json.loads(line) for line in sys.stdin)
