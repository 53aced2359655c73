# SPDX-License-Identifier: Apache-2.0
"""Additions to the stream may begin before their turn."""

from fork.language import add_import, before

EDITS = [
    add_import(
        "from vllm.model_executor.layers.residual.overlap_pass import "
        "begin_additions_early",
        why="What looks through the traced graph.",
    ),
    before(
        scope="VllmBackend.__call__",
        anchor="self.graph = graph",
        insert="""
if begin_additions_early(graph.graph):
    graph.recompile()
""",
        why="The graph is whole here, in the order of the program.",
    ),
]
