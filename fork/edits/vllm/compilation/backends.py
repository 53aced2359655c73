# SPDX-License-Identifier: Apache-2.0
"""Steering additions may start early, overlapping other kernels."""

from fork.language import before

EDITS = [
    before(
        scope="VllmBackend.__call__",
        anchor="self.graph = graph",
        insert="""
from vllm.model_executor.layers.residual.overlap_pass import begin_additions_early

if begin_additions_early(graph.graph):
    graph.recompile()
""",
        why="Here the graph is complete and in program order.",
    ),
]
