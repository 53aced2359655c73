# SPDX-License-Identifier: Apache-2.0
"""Runs prompts on one or several servers of one model.

Without it a user divides the prompts by hand, joins the data sets, and begins a share
again when its server is lost.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any, TypeAlias

from vllm.capture_dataset.prompts import Prompt, Tokens
from vllm.capture_dataset.remote import Server, ServerLostError
from vllm.capture_dataset.spec import RowsSpec
from vllm.capture_dataset.table import Captured
from vllm.logger import init_logger
from vllm.v1.capture.errors import fail

logger = init_logger(__name__)

Waiting: TypeAlias = "SimpleQueue[Prompt | None]"
"""Prompts that no server has; None ends a thread."""
Done: TypeAlias = "SimpleQueue[Captured | Exception]"


class ServersRunner:
    """A runner on servers, each of which takes prompts as fast as it can.

    A server that does not answer gets no more prompts; the others take its share. The
    servers choose how to batch requests, so the last bits of rows may differ from run
    to run.
    """

    def __init__(self, servers: Sequence[Server]) -> None:
        """Compare the servers.

        Raises:
            CaptureValidationError: two servers have other models or readout modules.

        """
        first, *others = servers
        modules = first.readout_modules() if others else {}
        for other in others:
            _check_equal(first, other, modules)
        self.model = first.model
        self.tokenizer = first.tokenizer
        self._servers = list(servers)
        self._left = list(servers)
        self._lock = Lock()

    def run(
        self, prompts: Sequence[Prompt], rows: RowsSpec, tokens: Tokens
    ) -> Iterator[Captured]:
        """Run the prompts of a shard."""
        waiting: Waiting = SimpleQueue()
        done: Done = SimpleQueue()
        for prompt in prompts:
            waiting.put(prompt)
        places = [one for one in self._left for _ in range(one.concurrency)]
        with ThreadPoolExecutor(len(places)) as pool:
            for server in places:
                pool.submit(self._work, server, rows, tokens, waiting, done)
            try:
                for _ in prompts:
                    found = done.get()
                    if isinstance(found, Exception):
                        raise found
                    yield found
            finally:
                _end(waiting, len(places))

    def _work(
        self,
        server: Server,
        rows: RowsSpec,
        tokens: Tokens,
        waiting: Waiting,
        done: Done,
    ) -> None:
        """Run prompts on a server, one after another, until none is left or it is."""
        while (prompt := waiting.get()) is not None:
            if server not in self._left:
                waiting.put(prompt)
                return
            try:
                done.put(server.run_one(prompt, rows, tokens))
            except ServerLostError as error:
                waiting.put(prompt)
                if not self._drop(server, error):
                    done.put(error)
                return
            except Exception as error:
                done.put(error)

    def _drop(self, server: Server, error: Exception) -> bool:
        """Use a server no more; returns whether another one is left."""
        with self._lock:
            if server in self._left:
                self._left.remove(server)
                logger.warning(
                    "server: %s is used no more, and %d others take its prompts: %s",
                    server.url,
                    len(self._left),
                    error,
                )
            return bool(self._left)

    def readout_modules(self) -> dict[str, Any]:
        """The modules, which all servers have."""
        return self._left[0].readout_modules()

    def close(self) -> None:
        """Close the connections."""
        for server in self._servers:
            server.close()


def _end(waiting: Waiting, threads: int) -> None:
    """Let the threads end after the requests that they have sent."""
    while True:
        try:
            waiting.get_nowait()
        except Empty:
            break
    for _ in range(threads):
        waiting.put(None)


def _check_equal(first: Server, other: Server, modules: dict[str, Any]) -> None:
    facts = replace(first.model, name="", max_model_len=0)
    theirs = replace(other.model, name="", max_model_len=0)
    if facts != theirs or modules != other.readout_modules():
        what = "other readout modules" if facts == theirs else "another model"
        raise fail(
            f"server: {other.url} has {what} than {first.url}; a data set is "
            "of one model, so start all servers with the same options",
            "server",
            other.url,
        )
