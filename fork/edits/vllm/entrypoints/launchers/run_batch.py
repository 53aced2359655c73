# SPDX-License-Identifier: Apache-2.0
"""A batch run waits for capture results before it writes its output file."""

from fork.language import add_import, first

EDITS = [
    add_import(
        "from vllm.entrypoints.serve.capture import batch as capture_batch",
        why="Sets the field that makes a response wait.",
    ),
    first(
        scope="run_request",
        insert="capture_batch.wait_for_results(request.body)",
        why="The output file is written once; a pending result would stay pending.",
    ),
]
