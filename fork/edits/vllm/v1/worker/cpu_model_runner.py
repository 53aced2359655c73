# SPDX-License-Identifier: Apache-2.0
"""The V1 CPU runner loads its model by itself."""

from fork.language import add_import, last

EDITS = [
    add_import(
        "from vllm.v1.worker import residual_stream",
        why="The runners' access to the residual stream.",
    ),
    last(
        scope="CPUModelRunner.load_model",
        insert="""
self.residual = residual_stream.open_residual_stream(
    self.vllm_config, self.model, self.device
)
""",
        why="Before the model is compiled.",
    ),
]
