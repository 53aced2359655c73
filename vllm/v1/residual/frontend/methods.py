# SPDX-License-Identifier: Apache-2.0
"""The modules with the public methods that the features add to `LLM` and `AsyncLLM`."""

from vllm.v1.capture.consumers.memory import api as rows
from vllm.v1.hooks.frontend import api as hooks
from vllm.v1.readouts.frontend import api as readouts
from vllm.v1.steering.frontend import api as steering

__all__ = ["hooks", "readouts", "rows", "steering"]
