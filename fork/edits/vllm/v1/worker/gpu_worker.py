# SPDX-License-Identifier: Apache-2.0
"""A step's output carries its readouts; a worker flushes rows before stop and sleep."""

from fork.language import add_argument, add_import, after, first, replace

EDITS = [
    add_import(
        "from vllm.v1.worker import residual_worker",
        why="The runners' interface to capture and steering.",
    ),
    replace(
        scope="Worker.sample_tokens",
        anchor="self.model_runner.sample_tokens(grammar_output)",
        by="residual_worker.with_readouts(self, grammar_output)",
        why="Adds the readouts of the step to its output.",
    ),
    after(
        scope="Worker.execute_model",
        anchor="""
intermediate_tensors = AsyncIntermediateTensors(
    tensor_dict,
    comm_handles=comm_handles,
    comm_postprocess=comm_postprocess,
)
""",
        insert="""
residual_worker.receive_rows(self, tensor_dict, intermediate_tensors.wait_for_comm)
""",
        why="Readouts, rows and gates of conditions come from earlier stages.",
    ),
    *[
        add_argument(
            scope="Worker.execute_model",
            call=f"get_pp_group().{call}_tensor_dict",
            argument="all_gather_tensors=residual_worker.UNSLICED",
            why="Only rank 0 has rows and results, so ranks send no slices of them.",
        )
        for call in ("irecv", "isend")
    ],
    replace(
        scope="Worker.execute_model",
        anchor="output.tensors",
        by="residual_worker.send_rows(self, output.tensors)",
        why="Readouts, rows and gates travel with the hidden states of their step.",
    ),
    first(
        scope="Worker.sleep",
        insert="residual_worker.before_sleep(self)",
        why="Rows must be copied before the device memory is released.",
    ),
    first(
        scope="Worker.shutdown",
        insert="residual_worker.close(self)",
        why="Rows in flight must reach their consumers before the process ends.",
    ),
]
