# SPDX-License-Identifier: Apache-2.0
"""Errors of steering in a step, which end the requests concerned and not the engine.

Tokens that were computed without a request's vectors must not reach its client, so the
request ends. The scheduler does so when it gets the step's output. Errors of capture,
readouts and hook functions are part of their results instead: the tokens are right.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from vllm.logger import init_logger
from vllm.v1.residual.plain_tensors import packed, unpacked
from vllm.v1.residual.plugin_errors import described

logger = init_logger(__name__)

FAILED = "residual_failed"
"""Name of the intermediate tensor of failed requests, pickled bytes `[n]` on the
host."""


class StepFaults:
    """The requests that must end, with the reasons. Engine thread only."""

    def __init__(self) -> None:
        self._ended: dict[str, str] = {}
        self._arriving: torch.Tensor | None = None
        """Those of earlier pipeline stages, which may still arrive."""

    def note(self, what: str, error: Exception, req_ids: Iterable[str]) -> None:
        """End requests because of an error, which is being handled."""
        logger.exception("%s failed; the requests of the step that use it end", what)
        self.add(dict.fromkeys(req_ids, f"{what} failed: {described(error)}"))

    def add(self, ended: Mapping[str, str]) -> None:
        """End requests, for the reasons given."""
        self._ended = {**ended, **self._ended}

    def take(self) -> dict[str, str] | None:
        """Remove and return the reasons by request; None if there are none."""
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            self.add(unpacked(arriving))
        ended, self._ended = self._ended, {}
        return ended or None

    def send(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """The intermediate tensors for the next stage, with the failed requests."""
        ended = self.take()
        return tensors if ended is None else {**tensors, FAILED: packed(ended)}

    def receive(self, tensors: dict[str, Any]) -> None:
        """Take the failed requests of earlier stages out of the tensors."""
        self._arriving = tensors.pop(FAILED, None)
