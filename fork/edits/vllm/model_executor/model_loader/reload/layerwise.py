# SPDX-License-Identifier: Apache-2.0
"""A tied head on a CPU does not go on with the weights before a reload."""

from fork.language import last

EDITS = [
    last(
        scope="finalize_layerwise_reload",
        insert="""
from vllm.model_executor.layers.tied_heads import pack_again

pack_again(args[0])
""",
        why="Every reload in place passes here; nothing is loaded into such a head.",
    ),
]
