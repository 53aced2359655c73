# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of steering."""

from typing import TYPE_CHECKING

from prometheus_client import Counter

from vllm.v1.residual.receipts import WAITING, Fired

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class SteeringMetrics:
    """The metrics of one front end; empty if the engine does not steer."""

    def __init__(self, vllm_config: "VllmConfig") -> None:
        """Register the metrics; names of an earlier engine must be unregistered."""
        self._model = vllm_config.model_config.served_model_name
        self._fired: Counter | None = None
        if vllm_config.steering_config.enabled:
            self._fired = Counter(
                "vllm:steering_fired_tokens",
                "Tokens at which a condition of steering has fired, by its probe.",
                ["model_name", "engine", "probe", "layer", "hook"],
            )
            self._waiting = Counter(
                "vllm:steering_waiting_steps",
                "Steps in which requests waited because the configurations of others "
                "took all of --max-steering-configs or --steering-bank-mib.",
                ["model_name", "engine"],
            )
            self._waiting.labels(self._model, "0")

    def add(self, engine: int, fired: Fired) -> None:
        """Increase the counts by what an engine has reported."""
        if self._fired is None:
            return
        for probe, layer, hook, count in fired:
            if (probe, layer, hook) == WAITING:
                self._waiting.labels(self._model, str(engine)).inc(count)
                continue
            labels = self._model, str(engine), probe, str(layer), hook
            self._fired.labels(*labels).inc(count)
