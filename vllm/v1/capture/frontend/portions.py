# SPDX-License-Identifier: Apache-2.0
"""Submission of a long offline list in portions whose rows fit in memory.

If the rows of a request do not fit beside those of requests in flight, an offline
request is not refused. Instead the engine runs until enough other requests have
finished. Their outputs are kept here until the whole list is done.
"""

import weakref
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine


class Portions:
    """Outputs of an offline engine that finished while the list was being submitted.

    Used only by the thread that adds requests and runs the engine.
    """

    def __init__(
        self, engine: "LLMEngine", wait: Callable[[Collection[Any]], None]
    ) -> None:
        """Start with no outputs.

        Args:
            engine: the engine to run.
            wait: waits for the results of final outputs, and attaches them.

        """
        # A weak reference, because the front end is closed by the engine's finalizer.
        self._engine = weakref.ref(engine)
        self._wait = wait
        self._finished: list[Any] = []

    def relieve(self) -> bool:
        """Run the engine until a captured request finishes; False if none is left."""
        engine = self._engine()
        assert engine is not None, "an engine that is gone admits a request"
        while engine.has_unfinished_requests():
            finished = [out for out in engine.step() if out.finished]
            self._finished += finished
            # Outputs of pooling lack the attribute.
            captured = [
                out for out in finished if getattr(out, "capture_id", None) is not None
            ]
            if captured:
                self._wait(captured)
                return True
        return False

    def take(self) -> list[Any]:
        """Return the outputs and forget them."""
        finished, self._finished = self._finished, []
        return finished

    def drop(self, request_ids: Collection[str]) -> None:
        """Discard the outputs of a list that was refused.

        Args:
            request_ids: internal ids: the client's ids with a suffix.

        """
        gone = {request_id.rpartition("-")[0] for request_id in request_ids}
        self._finished = [out for out in self._finished if out.request_id not in gone]
