# SPDX-License-Identifier: Apache-2.0
"""Merging results over the keys, pipeline stages and samples of a request."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.capture.payload import RowsByTap
from vllm.v1.capture.types import CaptureResult, CaptureStatus


def merge(request_id: str, results: Sequence[CaptureResult]) -> CaptureResult:
    """Merge results into one with the key `(request_id, -1, "*")`.

    The status is `"pending"` if any is, the common status if all agree,
    `"partial_error"` if some failed, otherwise `"ok"`. Errors are joined by `"; "`,
    payloads by `join_payloads`.
    """
    assert results, "there is no result to merge"
    errors = sorted({result.error for result in results if result.error})
    return CaptureResult(
        (request_id, -1, "*"),  # type: ignore[arg-type]
        _status(results),
        "; ".join(errors) or None,
        join_payloads([result.payload for result in results]),
    )


def _status(results: Sequence[CaptureResult]) -> CaptureStatus:
    seen = {result.status for result in results}
    if "pending" in seen:
        return "pending"
    if len(seen) == 1:
        return results[0].status
    if seen & {"error", "partial_error"}:
        return "partial_error"
    return "ok"


def join_payloads(payloads: Sequence[Any]) -> Any:
    """Concatenate lists, unite dicts, and collect other values in a list.

    None is skipped; a single payload stays as it is.
    """
    present = [payload for payload in payloads if payload is not None]
    if not present:
        return None
    if all(isinstance(payload, list) for payload in present):
        return [item for payload in present for item in payload]
    if all(isinstance(payload, RowsByTap) for payload in present):
        return RowsByTap.united(present)
    if all(isinstance(payload, dict) for payload in present):
        return {key: value for payload in present for key, value in payload.items()}
    return present[0] if len(payloads) == 1 else present


def merge_samples(
    request_id: str, samples: Mapping[int, CaptureResult]
) -> CaptureResult:
    """Merge the results of samples; the payload is a dict by sample index."""
    merged = merge(request_id, list(samples.values()))
    merged.payload = {index: result.payload for index, result in samples.items()}
    return merged
