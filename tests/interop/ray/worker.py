# SPDX-License-Identifier: Apache-2.0
"""The actor of a rank on CPUs; its process imports this."""

import os

import ray

if (
    ray.is_initialized()
):  # In the actor, before vllm. The runner is the driver's choice.
    import tests.support.interpreted  # noqa: F401

    del os.environ["VLLM_USE_V2_MODEL_RUNNER"]

from vllm.v1.executor.ray_executor_v2 import RayWorkerProc


class Worker(RayWorkerProc):
    """Has no device of its own."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        """The node, and a number in place of the device's."""
        return ray.get_runtime_context().get_node_id(), [0]
