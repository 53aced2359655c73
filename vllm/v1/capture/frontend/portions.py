# SPDX-License-Identifier: Apache-2.0
"""Offline lists whose rows do not fit at once are sent in portions that do.

A request that finds no room for its rows beside those in flight is not refused: the
engine runs until enough of the others have ended and their rows are their caller's.
Their outputs wait here until the list is complete.
"""

import weakref
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine


class Portions:
    """Outputs of an offline engine that were finished before the list was complete.

    Belongs to the thread that adds requests and runs the engine.
    """

    def __init__(
        self, engine: "LLMEngine", wait: Callable[[Collection[Any]], None]
    ) -> None:
        """Begin with none; `wait(outputs)` puts the results into final outputs."""
        # Not a reference: the front end closes when the engine is gone.
        self._engine = weakref.ref(engine)
        self._wait = wait
        self._finished: list[Any] = []

    def relieve(self) -> bool:
        """Run the engine until a captured request has ended; False if none is left."""
        engine = self._engine()
        assert engine is not None, "an engine that is gone admits a request"
        while engine.has_unfinished_requests():
            finished = [out for out in engine.step() if out.finished]
            self._finished += finished
            captured = [out for out in finished if _capture_id(out) is not None]
            if captured:
                self._wait(captured)
                return True
        return False

    def take(self) -> list[Any]:
        """The outputs, once; they belong to the list that is being run."""
        finished, self._finished = self._finished, []
        return finished

    def drop(self, request_ids: Collection[str]) -> None:
        """A list was refused: nobody comes for the outputs of its requests.

        Args:
            request_ids: as the engine knows them: the client's with a suffix.

        """
        gone = {request_id.rpartition("-")[0] for request_id in request_ids}
        self._finished = [out for out in self._finished if out.request_id not in gone]


def _capture_id(output: Any) -> str | None:
    """Outputs of pooling have none."""
    found: str | None = getattr(output, "capture_id", None)
    return found
