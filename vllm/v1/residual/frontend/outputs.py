# SPDX-License-Identifier: Apache-2.0
"""The results in `RequestOutput`."""

from typing import TYPE_CHECKING, Any

from vllm.v1.readouts.results import ReadoutResult, merge_results

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

__all__ = ["ReadoutResult", "merge", "readouts_of", "steering_of"]


def readouts_of(output: "RequestOutput") -> dict[str, ReadoutResult]:
    """Readout results of the first sample, by name."""
    return (output.outputs[0].readouts or {}) if output.outputs else {}


def steering_of(output: "RequestOutput") -> dict[str, Any] | None:
    """What steering did to the first sample, if a receipt was requested."""
    return output.outputs[0].steering if output.outputs else None


def merge(output: "RequestOutput", later: "RequestOutput", aggregate: bool) -> None:
    """Merge the results of a later output into `output`, before upstream's fields.

    Args:
        output: the earlier output of the same request.
        later: the later one.
        aggregate: whether a sample's outputs are joined; else the later replaces it.

    """
    output.capture_id = later.capture_id or output.capture_id
    own = {sample.index: sample for sample in output.outputs} if aggregate else {}
    for new in later.outputs:
        if (sample := own.get(new.index)) is not None:
            sample.readouts = merge_results(
                sample.readouts, new.readouts, new.finished()
            )
            sample.steering = new.steering or sample.steering
