# SPDX-License-Identifier: Apache-2.0
"""The serving engine has a front end of capture."""

from fork.language import add_import, before, first

EDITS = [
    add_import(
        "from vllm.v1.capture import frontend as capture_frontend",
        why="Opens the front end.",
    ),
    before(
        scope="AsyncLLM.__init__",
        anchor="self.logger_manager: StatLoggerManager | None = None",
        insert="self.capture = capture_frontend.open_for_async_engine(self)",
        why="The core is up, so the model's hook points are known.",
    ),
    before(
        scope="AsyncLLM.generate",
        anchor="yield out",
        insert="await self.capture.complete(out, sampling_params)",
        why="The last output carries the results, which it may have to wait for.",
    ),
    first(
        scope="AsyncLLM.shutdown",
        insert="""
if capture := getattr(self, "capture", None):
    capture.close()
""",
        why="Stops the thread that listens for results.",
    ),
]
