# SPDX-License-Identifier: Apache-2.0
"""Custom readouts: classes from entry points of the group `vllm.readouts`."""

import importlib.metadata
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vllm.logger import init_logger
from vllm.v1.readouts.plan import Tap
from vllm.v1.readouts.worker.jobs import Entry
from vllm.v1.residual.plugin_errors import is_interrupt

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

GROUP = "vllm.readouts"

MOST_FUNCTIONS = 64
"""Most functions of requests that are kept loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadoutContext:
    """The context of its rows that a custom readout receives."""

    request_id: str
    positions: range
    """Token positions of the rows."""
    num_prompt_tokens: int
    taps: tuple[Tap, ...]
    """`(layer, hook point)` of each row of a token."""
    params: dict[str, Any]
    """The readout's `params` in the request."""


class CustomReadouts:
    """One instance of each custom readout class, created at first use.

    A class has `__init__(vllm_config)` and `compute(rows, context)`. `rows` is
    `[tokens, taps, hidden_size]` on the device, in the model's dtype, and `context` a
    `ReadoutContext`; the result is a tensor `[tokens, ...]` on any device. `compute`
    runs on the engine's thread between steps, so it must not wait for the device.

    A function sent with a request is called as `fn(rows, context)` instead.
    """

    def __init__(self, vllm_config: "VllmConfig") -> None:
        self._vllm_config = vllm_config
        self._made: dict[str, Any] = {}
        self._functions: dict[bytes, Any] = {}
        """Functions of requests by their code, least recently used first."""
        self._complained: set[str] = set()

    def compute(
        self, entry: Entry, shift: int, rows: torch.Tensor, num_prompt_tokens: int
    ) -> torch.Tensor | str:
        """The result, or an error message; an error affects this result only.

        Args:
            entry: the readout, and the positions of its rows.
            shift: is added to the positions.
            rows: `[tokens, taps, hidden_size]`.
            num_prompt_tokens: of the request.

        """
        name = entry.readout.module or entry.readout.name
        start = entry.start + shift
        context = ReadoutContext(
            request_id=entry.req_id,
            positions=range(start, start + entry.count),
            num_prompt_tokens=num_prompt_tokens,
            taps=entry.readout.taps,
            params=json.loads(entry.readout.params or "{}"),
        )
        try:
            if entry.readout.code:
                found = self._function(entry.readout.code)(rows, context)
            else:
                found = self._instance(name).compute(rows, context)
            if not isinstance(found, torch.Tensor) or len(found) != entry.count:
                shape = tuple(getattr(found, "shape", ()))
                raise TypeError(
                    f"{name} returned {type(found).__name__} {shape}, not a tensor "
                    f"with a first dimension of {entry.count}"
                )
            return found
        except BaseException as error:  # Plug-in code may raise anything.
            if is_interrupt(error):
                raise
            if name not in self._complained:
                self._complained.add(name)
                logger.exception("The readout %r failed", name)
            return f"{type(error).__name__}: {error}"

    def _function(self, code: bytes) -> Any:
        if code not in self._functions:
            import cloudpickle

            self._functions[code] = cloudpickle.loads(code)
        self._functions[code] = self._functions.pop(code)
        if len(self._functions) > MOST_FUNCTIONS:
            self._functions.pop(next(iter(self._functions)))
        return self._functions[code]

    def _instance(self, name: str) -> Any:
        if name not in self._made:
            (found,) = importlib.metadata.entry_points(group=GROUP, name=name)
            self._made[name] = found.load()(self._vllm_config)
        return self._made[name]
