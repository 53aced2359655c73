# SPDX-License-Identifier: Apache-2.0
"""A step's output carries its readouts; a worker that stops or sleeps flushes rows."""

from fork.language import add_import, first, replace

EDITS = [
    add_import(
        "from vllm.v1.worker import residual_stream",
        why="The runners' access to the residual stream.",
    ),
    replace(
        scope="Worker.sample_tokens",
        anchor="self.model_runner.sample_tokens(grammar_output)",
        by="residual_stream.with_readouts(self, grammar_output)",
        why="The output carries what the step's requests have read out.",
    ),
    first(
        scope="Worker.sleep",
        insert="residual_stream.before_sleep(self)",
        why="Rows leave the device before its memory does; what follows waits for it.",
    ),
    first(
        scope="Worker.shutdown",
        insert="residual_stream.close(self)",
        why="Rows that are under way reach their consumers before the process ends.",
    ),
]
