# SPDX-License-Identifier: Apache-2.0
"""The `worker_cls` that scripts for vllm-activation-capture name.

Capture needs no special worker here: this is the platform's own class, under the
expected name.
"""

from vllm.platforms import current_platform

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as WorkerCapture
else:
    from vllm.v1.worker.gpu_worker import Worker as WorkerCapture

__all__ = ["WorkerCapture"]
