# SPDX-License-Identifier: Apache-2.0
"""Offline generation waits for the results of captures."""

from fork.language import before

EDITS = [
    before(
        scope="OfflineInferenceMixin._run_engine",
        anchor="return sorted(outputs, key=lambda x: int(x.request_id))",
        insert="self.llm_engine.capture.wait(outputs)\nself.llm_engine.hooks.check()",
        why="The outputs are returned with their results. A hook that has failed is "
        "an error.",
    ),
]
