# SPDX-License-Identifier: Apache-2.0
"""Which rows of a step operations change, beyond adding table rows."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping

import torch

from vllm.model_executor.layers.residual.row_edits import RowEdit
from vllm.v1.capture.staging.blocks import StepView
from vllm.v1.steering.operations import Operation, in_order
from vllm.v1.steering.plan import SteeringTiers, Tap


def plan_edits(
    view: StepView,
    tiers_of: Callable[[str], list[SteeringTiers]],
    prompt_lengths: Mapping[str, int],
    taps: Collection[Tap],
) -> dict[Tap, list[tuple[Operation, list[int]]]]:
    """The operations of a step with their rows, by tap, in their order.

    Args:
        view: the batch.
        tiers_of: what steers a request, the engine's vectors first.
        prompt_lengths: in tokens, by request.
        taps: those of this process.

    """
    # One operation that several requests share is carried out once for all; one
    # that a request has twice is carried out twice.
    found: dict[tuple[str, int], tuple[Operation, list[int]]] = {}
    first_row = view.first_row
    for index, req_id in enumerate(view.req_ids):
        start = int(view.num_computed[index])
        stop = start + int(view.num_scheduled[index])
        boundary = prompt_lengths.get(req_id, 0)
        middle = min(max(boundary, start), stop)
        offset = int(first_row[index]) - start
        tiers = tiers_of(req_id)
        phases = (
            ([one for t in tiers for one in t.prefill_operations], start, middle),
            ([one for t in tiers for one in t.decode_operations], middle, stop),
        )
        for operations, first, last in phases:
            times: Counter[str] = Counter()
            for one in operations:
                key = (one.digest, times[one.digest])
                times[one.digest] += 1
                rows = one.selected(boundary, first, last)
                if rows and one.tap in taps:
                    at_rows = found.setdefault(key, (one, []))[1]
                    at_rows.extend(row + offset for row in rows)
    edits: dict[Tap, list[tuple[Operation, list[int]]]] = {}
    rows_of = {id(one): rows for one, rows in found.values()}
    for one in in_order([one for one, _ in found.values()]):
        edits.setdefault(one.tap, []).append((one, rows_of[id(one)]))
    return edits


def row_edit(one: Operation, rows: list[int], device: torch.device) -> RowEdit:
    """An operation with its rows, on the device."""
    return RowEdit(
        torch.tensor(sorted(rows), dtype=torch.int64, device=device),
        one.op,
        torch.tensor(one.vector, device=device),
        one.scale,
        one.low,
        one.high,
        one.norm_match,
    )
