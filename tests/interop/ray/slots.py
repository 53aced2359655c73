# SPDX-License-Identifier: Apache-2.0
"""Lets upstream's Ray executor run on CPUs: its actors take slots in place of GPUs.

Upstream asks the platform which of Ray's resources a rank needs, and which devices Ray
has given to an actor. CPUs have no answer. Nothing else is changed.
"""

SLOT = "slot"
"""The resource of the cluster."""


def use_slots() -> None:
    """Let engines of this process ask for slots."""
    from tests.interop.ray.worker import Worker
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.executor import ray_executor_v2

    CpuPlatform.ray_device_key = SLOT
    ray_executor_v2.RayWorkerProc = Worker  # type: ignore[misc]
