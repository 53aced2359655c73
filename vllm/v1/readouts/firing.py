# SPDX-License-Identifier: Apache-2.0
"""What `stop_when` and `keep_when` compare, and where they fire."""

import numpy as np

from vllm.v1.readouts.results import ReadoutResult
from vllm.v1.residual.readout_plan import (
    KeepWhen,
    Kind,
    Readout,
    ReadoutPart,
    StopWhen,
)
from vllm.v1.residual.spans import OPEN_END, Spans, merged

EVERYTHING: Spans = ((0, OPEN_END),)
COMPARED: dict[Kind, str] = {
    "probe": "values",
    "custom": "values",
    "norm": "norm",
    "lens": "token_logprobs",
}
"""The array whose values are compared, by kind; that of an SAE depends on its form."""


def first_firing(
    part: ReadoutPart, readout: Readout, rule: StopWhen, least: int
) -> int | None:
    """The first position of a part, from `least` on, at which a rule fires."""
    values = values_of(part, readout, rule.index)
    for offset in range(max(least - part.start, 0), part.count):
        if rule.fires(float(values[offset])):
            return part.start + offset
    return None


def values_of(
    part: ReadoutPart, readout: Readout, index: int
) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    """The values `[count]` that a rule compares; NaN where there is none."""
    missing = np.full(part.count, np.nan, dtype=np.float32)
    arrays = part.arrays
    if readout.kind == "sae":
        if readout.features:
            column = readout.features.index(index)
            return np.asarray(arrays["activations"][:, column])
        hits = arrays["features"] == index
        return np.where(hits, arrays["activations"], 0.0).sum(axis=1)
    name = COMPARED[readout.kind]
    flat = arrays[name].reshape(part.count, -1) if name in arrays else missing[:, None]
    return np.asarray(flat[:, index]) if index < flat.shape[1] else missing


def kept_spans(keep: KeepWhen, readout: Readout, result: ReadoutResult) -> Spans:
    """The positions whose rows are kept; all of them if the readout has failed."""
    if result.error is not None:
        return EVERYTHING
    count = len(result.positions)
    part = ReadoutPart(readout.name, 0, count, result.arrays)
    values = values_of(part, readout, keep.rule.index) if count else ()
    at = [
        position
        for position, value in zip(result.positions, values)
        if keep.rule.fires(float(value))
    ]
    if keep.scope == "request":
        return EVERYTHING if at else ()
    return merged(map(keep.around, at))
