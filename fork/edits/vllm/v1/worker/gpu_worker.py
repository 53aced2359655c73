# SPDX-License-Identifier: Apache-2.0
"""A step's output carries its readouts; a worker flushes rows before stop and sleep."""

from fork.language import add_import, after, first, replace

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
    after(
        scope="Worker.execute_model",
        anchor="assert tensor_dict is not None",
        insert="residual_stream.receive_rows(self, tensor_dict)",
        why="The last stage reads out rows of earlier ones.",
    ),
    replace(
        scope="Worker.execute_model",
        anchor="output.tensors",
        by="residual_stream.send_rows(self, output.tensors)",
        why="Rows travel with the hidden states of their step.",
    ),
    first(
        scope="Worker.sleep",
        insert="residual_stream.before_sleep(self)",
        why="Rows must be copied before the device memory is released.",
    ),
    first(
        scope="Worker.shutdown",
        insert="residual_stream.close(self)",
        why="Rows in flight must reach their consumers before the process ends.",
    ),
]
