# SPDX-License-Identifier: Apache-2.0
"""`worker_cls` of scripts for vllm-activation-capture: the platform's own worker.

Capture needs no worker of its own here; the name is there so that scripts run.
"""

from vllm.platforms import current_platform

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as WorkerCapture
else:
    from vllm.v1.worker.gpu_worker import Worker as WorkerCapture

__all__ = ["WorkerCapture"]
