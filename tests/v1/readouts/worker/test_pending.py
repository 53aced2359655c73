# SPDX-License-Identifier: Apache-2.0
"""A step's output with additions is upstream's in all else."""

from unittest.mock import Mock

from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.step_additions import Additions, attach


class Output(AsyncModelRunnerOutput):
    """An output as upstream 0.33.0 has it."""

    def get_output(self) -> ModelRunnerOutput:
        return Mock(ModelRunnerOutput)

    def get_kv_connector_output(self) -> str:
        return "what was sent"


def test_an_output_with_additions_is_asked_as_the_one_within() -> None:
    output = attach(Output(), Additions(failed={"a": "its receipt failed"}))
    assert output.get_kv_connector_output() == "what was sent"
    assert output.get_output().failed == {"a": "its receipt failed"}
