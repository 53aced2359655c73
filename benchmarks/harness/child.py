# SPDX-License-Identifier: Apache-2.0
"""A process of its own that answers line by line, in the environment of another vLLM.

Each request and each answer is one line of JSON. What libraries print in the process
goes to its log, so that answers stay alone.
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
    # The system places the threads: processes bound to one core would be hit by
    # whatever else runs there.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Of processes that hold an engine; those for a GPU do nothing on a CPU, and back."""


class Child:
    """The parent's end."""

    def __init__(
        self,
        command: Sequence[str | Path],
        log: Path,
        environment: Mapping[str, str],
        folder: Path | None = None,
    ) -> None:
        """Start it.

        Args:
            command: what to run; it calls `answers` and `requests`.
            log: gets what it prints.
            environment: all of it.
            folder: where it runs, by default where the parent does.

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
        """Have one request carried out; its answer.

        Raises:
            RuntimeError: the process ended; its log says why.

        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # that there is no answer says it
            self._process.stdin.write(json.dumps(request) + "\n")
        return self.answer()

    def answer(self) -> Any:
        """The next answer, for example the one that says that it is ready.

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
    """The process's end: gives answers from now on, and prints to the log."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(what: Any) -> None:
        lines.write(json.dumps(what) + "\n")

    return answer


def requests() -> Iterable[Any]:
    """The process's end: what it is asked, until the parent closes it."""
    return (json.loads(line) for line in sys.stdin)
