# SPDX-License-Identifier: Apache-2.0
"""A batch run waits for capture results before it writes its output file.

A line with refused fields gets an error of its own.
"""

from fork.language import Edit, add_import, first, replace, since, until


def read_line(scope: str) -> Edit:
    """The edit of a function that parses a line."""
    return replace(
        scope=scope,
        anchor="BatchRequestInput.model_validate_json(request_json)",
        by="capture_batch.read_line(BatchRequestInput, request_json)",
        why="A refused field is an error of its line, not of the whole file.",
    )


EDITS = [
    add_import(
        "from vllm.entrypoints.serve.capture import batch as capture_batch",
        why="Reads lines, and sets the field that makes a response wait.",
    ),
    *until("0.33.0", read_line("run_batch")),
    *since("0.33.0", read_line("validate_batch"), read_line("run_one_request")),
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
