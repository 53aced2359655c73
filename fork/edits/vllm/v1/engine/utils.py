# SPDX-License-Identifier: Apache-2.0
"""A stopping engine process has time to deliver captured rows."""

from fork.language import after, before

EDITS = [
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
from vllm.v1.capture.shutdown import process_seconds

process_timeout = process_seconds(self._vllm_config, process_timeout)
""",
        why="Without --shutdown-timeout upstream kills the process at once.",
    ),
]
