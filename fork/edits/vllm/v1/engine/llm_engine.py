# SPDX-License-Identifier: Apache-2.0
"""The offline engine has front ends of capture and steering."""

from fork.language import add_import, before, last

EDITS = [
    add_import(
        "from vllm.v1.capture.frontend import attach as capture_attaching",
        why="Creates the front end.",
    ),
    add_import(
        "from vllm.v1.hooks.frontend import attach as hooks_attaching",
        why="Creates the front end.",
    ),
    add_import(
        "from vllm.v1.steering.frontend.frontend import SteeringControl",
        why="Creates the front end.",
    ),
    before(
        scope="LLMEngine.__init__",
        anchor="self._profile_session_active = False",
        insert="""
self.capture = capture_attaching.open_for_engine(self)
self.steering = SteeringControl(self)
self.hooks = hooks_attaching.open_for_engine(self)
""",
        why="The core has started, so the model's hook points are known.",
    ),
    before(
        scope="LLMEngine.step",
        anchor="return processed_outputs.request_outputs",
        insert="""
self.capture.note_results(processed_outputs.request_outputs)
self.hooks.complete(processed_outputs.request_outputs)
""",
        why="Callers that step the engine themselves also receive the results.",
    ),
    last(
        scope="LLMEngine.__init__",
        insert="self.capture.publish(self.logger_manager)",
        why="Metrics of capture are exported with the engine's.",
    ),
]
