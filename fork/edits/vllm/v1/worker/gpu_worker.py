# SPDX-License-Identifier: Apache-2.0
"""A step's output carries its readouts; a stopping worker flushes its captures."""

from fork.language import add_import, first, replace

EDITS = [
    add_import(
        "from vllm.v1.worker import residual_stream",
        why="The runners' interface to capture and steering.",
    ),
    replace(
        scope="Worker.sample_tokens",
        anchor="self.model_runner.sample_tokens(grammar_output)",
        by="residual_stream.with_readouts(self, grammar_output)",
        why="Adds the readouts of the step to its output.",
    ),
    first(
        scope="Worker.shutdown",
        insert="residual_stream.close(self)",
        why="Rows in flight must reach their consumers before the process ends.",
    ),
]
