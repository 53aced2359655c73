# SPDX-License-Identifier: Apache-2.0
"""A stopping engine process has time to deliver captured rows."""

from fork.language import add_import, after, before

EDITS = [
    add_import(
        "from vllm.v1.capture import shutdown as capture_shutdown",
        why="Determines the timeout.",
    ),
    after(
        scope="CoreEngineProcManager.__init__",
        anchor="self._request_shutdown_timeout = vllm_config.shutdown_timeout",
        insert="self._vllm_config = vllm_config",
        why="It determines whether anything is captured.",
    ),
    before(
        scope="CoreEngineProcManager.shutdown",
        anchor="shutdown(self.processes, timeout=process_timeout)",
        insert="""
process_timeout = capture_shutdown.process_seconds(self._vllm_config, process_timeout)
""",
        why="Without --shutdown-timeout upstream kills the process at once.",
    ),
]
