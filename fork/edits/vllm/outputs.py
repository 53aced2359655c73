# SPDX-License-Identifier: Apache-2.0
"""A final output carries the results of the request's capture."""

from fork.language import add_field, add_import, first, last

EDITS = [
    add_import(
        """
from vllm.interop.vllm_lens import responses as lens_responses
from vllm.v1.residual.frontend import outputs as residual_outputs
""",
        why="Results of the first sample, merged ones, and rows as vllm-lens has them.",
    ),
    add_field(
        scope="CompletionOutput",
        after="weight_versions",
        insert="""
readouts: dict[str, residual_outputs.ReadoutResult] | None = None
steering: dict[str, Any] | None = None
""",
        why="Each sample has its own results.",
    ),
    last(
        scope="RequestOutput",
        insert="""
capture_id: str | None = None
capture_results: dict[str, Any] | None = None
hooks_key: str | None = None
hook_results: dict[str, Any] | None = None
lens_result: Any = None
activations = property(lens_responses.activations_of)
readouts = property(residual_outputs.readouts_of)
steering = property(residual_outputs.steering_of)
save_html = residual_outputs.save_html
""",
        why="Results are set when they are known; most requests have one sample.",
    ),
    first(
        scope="RequestOutput.add",
        insert="residual_outputs.merge(self, next_output, aggregate)",
        why="Merged outputs keep the results of both.",
    ),
]
