# SPDX-License-Identifier: Apache-2.0
"""Offline generation waits for the results of captures."""

from fork.language import after, before

EDITS = [
    before(
        scope="OfflineInferenceMixin._run_engine",
        anchor="return sorted(outputs, key=lambda x: int(x.request_id))",
        insert="self.llm_engine.capture.wait(outputs)\nself.llm_engine.hooks.check()",
        why="The outputs are returned with their results. A hook that has failed is "
        "an error.",
    ),
    after(
        scope="OfflineInferenceMixin._run_engine",
        anchor="outputs: list[_O] = []",
        insert="outputs.extend(self.llm_engine.capture.take_finished())",
        why="Requests may finish early to make room for the rows of later ones.",
    ),
    before(
        scope="OfflineInferenceMixin._render_and_add_requests",
        anchor="raise e",
        insert="self.llm_engine.capture.drop_finished(added_request_ids)",
        why="The list is rejected: drop outputs of requests that finished early.",
    ),
]
