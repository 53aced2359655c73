# SPDX-License-Identifier: Apache-2.0
"""The offline engine has front ends of capture, steering and hooks."""

from fork.language import add_import, before, first, last

EDITS = [
    add_import(
        "from vllm.v1.residual.frontend.front_end import NO_FRONT_END, open_front_end",
        why="The engine's interface to the features.",
    ),
    first(
        scope="LLMEngine",
        insert="residual = NO_FRONT_END",
        why="Engines that are made without their constructor work.",
    ),
    last(
        scope="LLMEngine.__init__",
        insert="""
self.residual = open_front_end(self, offline=True)
self.capture = self.residual.capture
self.steering = self.residual.control
self.hooks = self.residual.hooks
""",
        why="The core has started, so the model's hook points are known.",
    ),
    before(
        scope="LLMEngine.step",
        anchor="return processed_outputs.request_outputs",
        insert="self.residual.note_step(processed_outputs.request_outputs)",
        why="Callers that step the engine themselves also receive the results.",
    ),
]
