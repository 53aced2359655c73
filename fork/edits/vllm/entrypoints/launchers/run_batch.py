# SPDX-License-Identifier: Apache-2.0
"""A batch run waits for capture results before it writes its output file.

A line with refused fields gets an error of its own.
"""

from fork.language import add_import, first, replace

EDITS = [
    add_import(
        "from vllm.entrypoints.serve.capture import batch as capture_batch",
        why="Reads lines, and sets the field that makes a response wait.",
    ),
    replace(
        scope="run_batch",
        anchor="BatchRequestInput.model_validate_json(request_json)",
        by="capture_batch.read_line(BatchRequestInput, request_json)",
        why="A refused field is an error of its line, not of the whole file.",
    ),
    first(
        scope="run_request",
        insert="""
if (refused := capture_batch.refusal(request.body)) is not None:
    return make_error_request_output(request, error_msg=refused)
capture_batch.wait_for_results(request.body)
""",
        why="Gives the line its error. The output file is written once; a pending "
        "result would stay pending.",
    ),
]
