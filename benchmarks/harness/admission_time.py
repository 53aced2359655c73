# SPDX-License-Identifier: Apache-2.0
"""Times the work for a request's steering before its first step, without a model.

For one vector of width 4096: validation, serialisation to the engine core and back, the
keys of the prompt's blocks, the slot, and the rows of the tables.
"""

import base64
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm import SamplingParams
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.steering.core import prefix_cache
from vllm.v1.steering.core.scheduler import SteeringScheduling
from vllm.v1.steering.frontend.admission import SteeringAdmission
from vllm.v1.steering.frontend.modules import SteeringModules
from vllm.v1.steering.spec.parse import SteeredModel
from vllm.v1.steering.worker.tables import SteeringTables

LAYERS, WIDTH, BLOCK, PROMPT = 32, 4096, 128, 512
HOOKS = ("pre_attn", "post_attn", "post_block")


class Path:
    """The parts of an engine that a steered request passes through."""

    def __init__(self) -> None:
        points = {layer: HOOKS for layer in range(LAYERS)}
        self.modules = SteeringModules()
        model = SteeredModel(points, WIDTH, torch.bfloat16)
        self.admission = SteeringAdmission(model, self.modules)
        self.scheduling = SteeringScheduling(4)
        taps = [(layer, hook) for layer in points for hook in HOOKS]
        cpu = torch.device("cpu")
        self.tables = SteeringTables(taps, 11, WIDTH, torch.bfloat16, cpu, PROMPT)
        self.encoder = MsgpackEncoder()
        self.decoder = MsgpackDecoder(SamplingParams)

    def take(self, name: str, params: SamplingParams) -> None:
        """Process one request from admission until its table rows are written."""
        self.admission.admit(params, PROMPT, False)
        received = self.decoder.decode(self.encoder.encode(params))
        request: Any = SimpleNamespace(
            request_id=name, sampling_params=received, num_prompt_tokens=PROMPT
        )
        for start in range(0, PROMPT, BLOCK):
            prefix_cache.extra_keys(request, start, start + BLOCK)
        self.scheduling.new_step()
        assert self.scheduling.admits(request)
        self.scheduling.begin(request)
        step = self.scheduling.take_step()
        assert step is not None
        for slot, tiers in step.loads:
            self.tables.load(slot, tiers)
        self.scheduling.release(request)


def packed(seed: int) -> dict[str, Any]:
    """One vector in the packed form, as parsed from JSON."""
    vector = np.random.default_rng(seed).normal(size=WIDTH).astype(np.float32)
    data = base64.b64encode(vector.tobytes()).decode()
    form = {"dtype": "float32", "shape": [1, WIDTH], "layer_indices": [16]}
    return {"post_block": {**form, "data": data}}


def measure_admission(requests: int = 300) -> dict[str, list[float]]:
    """Milliseconds per request, minus those of an unsteered request."""
    path = Path()
    for i in range(8):
        tiers = path.admission.named_tiers({"vectors": packed(i)})
        path.modules.register(f"module {i}", tiers)
    inline = [packed(1000 + i) for i in range(requests)]
    # Eight names on four slots, so that every request must load its rows again.
    found = {
        "plain": _times(path, requests, lambda i: {}),
        "named": _times(path, requests, lambda i: {"steering_name": f"module {i % 8}"}),
        "packed": _times(path, requests, lambda i: {"steering_vectors": inline[i]}),
    }
    nothing = sorted(found["plain"])[requests // 2]
    return {what: [t - nothing for t in times] for what, times in found.items()}


def _times(
    path: Path, requests: int, fields: Callable[[int], dict[str, Any]]
) -> list[float]:
    times = []
    for i in range(requests + 20):
        params = SamplingParams(max_tokens=8, **fields(max(i - 20, 0)))
        start = time.perf_counter()
        if fields(0):
            path.take(f"request {i}", params)
        else:
            path.decoder.decode(path.encoder.encode(params))
        times.append((time.perf_counter() - start) * 1e3)
    return times[20:]


if __name__ == "__main__":
    for what, times in measure_admission().items():
        times.sort()
        print(f"{what}: median {times[len(times) // 2]:.4f} ms, most {times[-1]:.4f}")
