# SPDX-License-Identifier: Apache-2.0
"""A tied head on a CPU does not go on with the weights before a reload."""

from fork.language import add_import, last

EDITS = [
    add_import(
        "from vllm.model_executor.layers.tied_heads import pack_again",
        why="Packs its weights.",
    ),
    last(
        scope="finalize_layerwise_reload",
        insert="pack_again(args[0])",
        why="Every reload in place passes here; nothing is loaded into such a head.",
    ),
]
