# SPDX-License-Identifier: Apache-2.0
"""A front end learns the model's hook points when the engine core is ready."""

from fork.language import after

EDITS = [
    after(
        scope="MPClient._apply_ready_response",
        anchor="cache_config.block_size = response.block_size",
        insert="vllm_config.capture_config.hook_points = response.hook_points",
        why="Admission reads them from the configuration.",
    ),
]
