# SPDX-License-Identifier: Apache-2.0
"""Instructions of operations, and their vectors on the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch

from vllm.model_executor.layers.residual.capture_op import ALIGNMENT
from vllm.model_executor.layers.residual.program import (
    Activation,
    Flag,
    Instruction,
    Kind,
)
from vllm.utils.math_utils import round_up
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.residual.tap import Tap
from vllm.v1.steering.plan import Operation, Vector
from vllm.v1.steering.worker.features import (
    SAEs,
    carried_instruction,
    feature_instruction,
)

FIRST_ROW = 0
"""Placeholder for the row offset of instructions with one row per position."""

Draft: TypeAlias = dict[str, Any]
"""The fields of an instruction, with arrays in place of tensors."""


def uploaded(drafts: Sequence[Draft], device: torch.device) -> list[Instruction]:
    """The instructions of drafts, whose arrays are sent to the device in one copy."""
    if not drafts:
        return []
    arrays = [one for draft in drafts for one in draft.values() if _is_array(one)]
    step = ALIGNMENT // np.dtype(np.float32).itemsize
    *starts, size = accumulate((round_up(one.size, step) for one in arrays), initial=0)
    joined = np.zeros(size, dtype=np.float32)
    for start, array in zip(starts, arrays, strict=True):
        joined[start : start + array.size] = array.ravel()
    sent = async_tensor_h2d(joined, device, torch.float32)
    tensors = (
        sent[start : start + array.size].view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    )

    def on_device(draft: Draft) -> Draft:
        return {k: next(tensors) if _is_array(v) else v for k, v in draft.items()}

    return [Instruction(**on_device(draft)) for draft in drafts]


def _is_array(value: object) -> bool:
    return isinstance(value, np.ndarray)


def _unit(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Vectors `[..., H]` normalized to length 1, in double precision."""
    wide = vectors.astype(np.float64)
    norms = np.linalg.norm(wide, axis=-1, keepdims=True)
    return (wide / norms).astype(np.float32)


def draft_sum(vector: Vector) -> Draft:
    """Draft the addition of a vector as given."""
    return {"kind": Kind.LINEAR, "read": vector[None], "c0": 1.0}


def _draft(one: Operation, width: int) -> Draft:
    """Draft the instruction of an operation on rows of a width."""
    details = one.details
    rows = one.vector.reshape(-1, width)
    if one.norm_match or one.op in ("project_out", "clamp", "swap"):
        rows = _unit(rows)
    draft: Draft = {"kind": Kind.LINEAR, "read": rows}
    if one.num_rows:
        draft["offset"] = FIRST_ROW
    plain, matched = (0.0, one.scale) if one.norm_match else (one.scale, 0.0)
    bounds = {
        "low": -np.inf if one.low is None else one.low,
        "high": np.inf if one.high is None else one.high,
    }
    match one.op:
        case "add":
            draft |= {"c0": plain, "c1": matched}
        case "project_out":
            draft |= {"flags": Flag.DOT, "c2": -one.scale}
        case "clamp":
            draft |= {"flags": Flag.DOT, "c3": details.strength, **bounds}
        case "swap":
            write = _unit(_array(one, "target")) - rows
            draft |= {"flags": Flag.DOT, "c2": 1.0, "write": write}
        case "replace":
            draft |= {
                "kind": Kind.REPLACE,
                "flags": Flag.SAVE_NORM if one.norm_match else Flag.NONE,
                "c0": plain,
                "c1": matched,
                "alpha": details.alpha,
                "mask": details.array("mask"),
            }
        case "rotate":
            angle = np.deg2rad(details.degrees)
            draft |= {
                "kind": Kind.ROTATE,
                "read": rows[:1],
                "write": rows[1:],
                "c0": float(np.cos(angle)),
                "c1": float(np.sin(angle)),
            }
        case "low_rank":
            draft |= {
                "kind": Kind.LOW_RANK,
                "write": _array(one, "write").reshape(-1, width),
                "c1": one.scale,
                **bounds,
                "activation": Activation[details.activation.upper()],
                "bias": details.array("bias"),
                "threshold": details.array("threshold"),
            }
    return draft


def _array(one: Operation, name: str) -> Vector:
    found = one.details.array(name)
    assert found is not None, f"{one.op} has no {name}"
    return found


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Kept:
    """An instruction and its vectors on the device, alive while a phase uses it."""

    instruction: Instruction
    carried: Instruction | None
    """Stores the value that the instruction needs from an earlier hook point."""


class Bank:
    """The vectors of operations on the device, without duplicates.

    Both phases of a configuration share its base operations, and all configurations
    share the engine's. Memory of the configured size is reserved while the engine
    measures how much is free.
    """

    def __init__(
        self,
        width_at: Callable[[Tap], int],
        device: torch.device,
        num_bytes: int,
        saes: SAEs,
    ) -> None:
        """Reserve `num_bytes` on the device; `width_at` has each hook point's width."""
        self._width_at = width_at
        self._saes = saes
        self._device = device
        self._kept: WeakValueDictionary[str, Kept] = WeakValueDictionary()
        self._reserved: torch.Tensor | None = torch.empty(
            num_bytes, dtype=torch.uint8, device=device
        )
        self.num_bytes = num_bytes
        """Bytes that the vectors may take, part of the model's memory."""

    def fetch(self, operations: Sequence[Operation]) -> list[Kept]:
        """The operations' instructions; missing vectors are uploaded in one copy."""
        self._reserved = None  # The vectors use the reserved memory.
        found = {one.digest: self._kept.get(one.digest) for one in operations}
        missing = {one.digest: one for one in operations if found[one.digest] is None}
        drafts = {
            digest: _draft(one, self._width_at(one.tap))
            for digest, one in missing.items()
            if one.details.feature is None
        }
        own = uploaded(list(drafts.values()), self._device)
        sent = dict(zip(drafts, own, strict=True))
        made = {
            digest: Kept(
                sent.get(digest) or feature_instruction(one, self._saes),
                carried_instruction(one, self._saes),
            )
            for digest, one in missing.items()
        }
        self._kept.update(made)
        return [found[one.digest] or made[one.digest] for one in operations]
