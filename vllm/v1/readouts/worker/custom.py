# SPDX-License-Identifier: Apache-2.0
"""Custom readouts: classes from entry points of the group `vllm.readouts`."""

import importlib.metadata
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vllm.logger import init_logger
from vllm.v1.readouts.worker.jobs import Entry, ReadingRequest
from vllm.v1.residual.plugin_errors import described, is_interrupt
from vllm.v1.residual.tap import Tap

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

GROUP = "vllm.readouts"

MOST_FUNCTIONS = 64
"""Most functions of requests that are kept loaded."""

_KEPT = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float16, torch.float32, torch.float64}
)
"""Dtypes of results; other floating-point ones become float32."""


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
    `ReadoutContext`; the result is a dense tensor `[tokens, ...]` of real numbers on
    any device, in which a token's values have the same shape in every step. `compute`
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
        self, entry: Entry, shift: int, rows: torch.Tensor, request: ReadingRequest
    ) -> torch.Tensor | str:
        """The result, or an error message; an error affects this result only.

        Args:
            entry: the readout, and the positions of its rows.
            shift: is added to the positions.
            rows: `[tokens, taps, hidden_size]`.
            request: the request of the entry; keeps the shape of its values.

        """
        name = entry.readout.module or entry.readout.name
        start = entry.start + shift
        context = ReadoutContext(
            request_id=entry.req_id,
            positions=range(start, start + entry.count),
            num_prompt_tokens=request.num_prompt_tokens,
            taps=entry.readout.taps,
            params=json.loads(entry.readout.params or "{}"),
        )
        try:
            if entry.readout.code:
                found = self._function(entry.readout.code)(rows, context)
            else:
                found = self._instance(name).compute(rows, context)
            return _checked(name, found, entry, request.shapes)
        except BaseException as error:  # Plug-in code may raise anything.
            if is_interrupt(error):
                raise
            if name not in self._complained:
                self._complained.add(name)
                logger.exception("The readout %r failed", name)
            return described(error)

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


def _checked(
    name: str, found: Any, entry: Entry, shapes: dict[str, tuple[int, ...]]
) -> torch.Tensor:
    """The values of an entry's tokens, in memory that no other step uses.

    Args:
        name: of the readout, for the message.
        found: what it returned.
        entry: whose rows it was given.
        shapes: by readout of the request, the shape of a token's values.

    Raises:
        TypeError: the results of a request's steps could not be joined, or not sent.

    """
    shape = tuple(getattr(found, "shape", ()))
    is_dense = isinstance(found, torch.Tensor) and found.layout == torch.strided
    if not is_dense or shape[:1] != (entry.count,):
        raise TypeError(
            f"{name} returned {type(found).__name__} {shape}, not a dense tensor "
            f"with a first dimension of {entry.count}"
        )
    first = shapes.setdefault(entry.readout.name, shape[1:])
    if shape[1:] != first:
        raise TypeError(
            f"{name} returned values of the shape {list(shape[1:])} for a token, and "
            f"{list(first)} before; they have one shape in all of a request's steps"
        )
    if found.dtype not in _KEPT:
        if not found.is_floating_point():
            raise TypeError(f"{name} returned {found.dtype}, not real numbers")
        return found.detach().float()
    return found.detach().clone()
