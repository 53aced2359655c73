# SPDX-License-Identifier: Apache-2.0
"""Joining results: over the streams of a request, its stages and its samples."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.capture.payload import RowsByTap
from vllm.v1.capture.types import CaptureResult, CaptureStatus


def merge(request_id: str, results: Sequence[CaptureResult]) -> CaptureResult:
    """One result for several: the worst status, all errors, the joined payloads."""
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
    """Lists are concatenated, dicts united; other values are put in a list."""
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
    """The result of a request with several samples: `payload[sample index]`."""
    merged = merge(request_id, list(samples.values()))
    merged.payload = {index: result.payload for index, result in samples.items()}
    return merged
