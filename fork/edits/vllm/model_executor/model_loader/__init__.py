# SPDX-License-Identifier: Apache-2.0
"""A model's first layers alone can be loaded."""

from fork.language import after

EDITS = [
    after(
        scope="get_model_loader",
        anchor="load_format = load_config.load_format",
        insert="""
if load_format == "first_layers":
    from vllm.interop.first_layers import FirstLayersLoader

    return FirstLayersLoader(load_config)
""",
        why="Models refuse weights of layers that they lack; imported on demand.",
    ),
]
