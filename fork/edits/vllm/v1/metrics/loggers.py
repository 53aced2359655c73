# SPDX-License-Identifier: Apache-2.0
"""Prometheus exports how often conditions of steering have fired."""

from fork.language import after, first

EDITS = [
    after(
        scope="PrometheusStatLogger.__init__",
        anchor="unregister_vllm_metrics()",
        insert="""
from vllm.v1.steering.frontend.metrics import SteeringMetrics

self.steering_metrics = SteeringMetrics(vllm_config)
""",
        why="Must follow the removal of an earlier engine's metrics.",
    ),
    first(
        scope="PrometheusStatLogger.record",
        insert="""
if scheduler_stats is not None and scheduler_stats.steering_fired:
    self.steering_metrics.add(engine_idx, scheduler_stats.steering_fired)
""",
        why="Adds what the engine has counted since its last report.",
    ),
]
