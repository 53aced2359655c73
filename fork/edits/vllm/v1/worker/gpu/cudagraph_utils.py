# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs are recorded in families with different launching taps."""

from fork.language import add_argument, add_field, add_import, before, first, last

EDITS = [
    add_import(
        "from vllm.v1.worker import residual_graphs",
        why="Defines the families.",
    ),
    add_field(
        scope="BatchExecutionDescriptor",
        after="num_ubatches",
        insert="""
# The family of graphs: which taps launch in them, 0 for none.
tapped: int = 0
""",
        why="The key under which a full graph is recorded and found.",
    ),
    last(
        scope="ModelCudaGraphManager.__init__",
        insert=(
            "self._capture_descs = residual_graphs.with_families("
            "self._capture_descs, self.vllm_config)"
        ),
        why="Each graph of the target model is recorded once per family.",
    ),
    first(
        scope="ModelCudaGraphManager.capture.create_forward_fn.forward_fn",
        insert="residual_graphs.record_family(desc.tapped, desc.cg_mode)",
        why="While a graph is recorded its family decides whether taps launch.",
    ),
    add_argument(
        scope="ModelCudaGraphManager.capture.create_forward_fn.forward_fn",
        call="BatchDescriptor",
        argument="tapped=desc.tapped",
        why="Piecewise graphs are recorded under this key.",
    ),
    before(
        scope="ModelCudaGraphManager.capture",
        anchor="super().capture(create_forward_fn, progress_bar_desc)",
        insert=(
            "self.residual_recorder = residual_graphs.begin_recording("
            "self, create_forward_fn)"
        ),
        why="Further graphs are recorded in the same way while serving.",
    ),
    last(
        scope="ModelCudaGraphManager.capture",
        insert="residual_graphs.end_recording()",
        why="Passes outside a step launch no taps.",
    ),
]
