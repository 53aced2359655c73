# SPDX-License-Identifier: Apache-2.0
"""An engine core whose ranks hold real tables, without a model."""

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from vllm.config.steering import SteeringConfig
from vllm.v1.residual.model_identity import ModelIdentity
from vllm.v1.steering.core import engine as engines
from vllm.v1.steering.core import name_log
from vllm.v1.steering.core.scheduler import SteeringScheduling
from vllm.v1.steering.frontend.admission import SteeringAdmission
from vllm.v1.steering.frontend.async_frontend import AsyncSteeringControl
from vllm.v1.steering.frontend.dp_engines import Engines
from vllm.v1.steering.frontend.frontend import SteeringFrontend
from vllm.v1.steering.frontend.modules import SteeringModules
from vllm.v1.steering.spec.parse import SteeredModel
from vllm.v1.steering.worker.worker import WorkerSteering

LAYERS, WIDTH = 2, 4
POINTS = ("pre_attn", "post_attn", "post_block")


class FaultyWorker(WorkerSteering):
    """A rank that fails on demand."""

    fails = False

    def stage_global(self, tiers: Any) -> None:
        """Stage a change like a rank, or fail."""
        super().stage_global(tiers)
        if self.fails:
            raise MemoryError("no room for the rows of rank 1")


def worker(layers: range) -> FaultyWorker:
    """A rank with some of the layers."""
    config: Any = SimpleNamespace(
        steering_config=SteeringConfig(enabled=True, max_configs=2),
        capture_config=SimpleNamespace(takes_actions=False),
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=None),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=16),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
    )
    taps = [(layer, hook) for layer in layers for hook in POINTS]
    device = torch.device("cpu")
    return FaultyWorker(config, taps, WIDTH, torch.float32, device, {}.__getitem__)


class Core:
    """The parts of an engine core that `set_steering` and `get_steering` use."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        every = range(LAYERS)
        self.cache_resets = 0
        # Tensor parallel ranks of one stage, and a second stage.
        self.ranks = [worker(every), worker(every[:1]), worker(every[1:])]
        self.scheduler = SimpleNamespace(
            residual=SimpleNamespace(steering=SteeringScheduling(2)),
            requests={},
            hash_block_size=16,
            reset_prefix_cache=self._reset,
        )
        self.model_executor = SimpleNamespace(
            collective_rpc=self._rpc, sleeping_tags=set()
        )
        self.vllm_config = SimpleNamespace(
            steering_config=SteeringConfig(enabled=True, max_configs=2),
            model_config=SimpleNamespace(dtype=dtype),
        )

    def _reset(self) -> bool:
        self.cache_resets += 1
        return True

    def _rpc(self, method: Any, args: tuple[Any, ...] = ()) -> list[Any]:
        workers = [
            SimpleNamespace(
                model_runner=SimpleNamespace(residual=SimpleNamespace(steering=rank))
            )
            for rank in self.ranks
        ]
        return [method(each, *args) for each in workers]

    def content(self) -> list[bytes]:
        """The bytes of every rank's tables."""
        return [rank.tables._table.numpy().tobytes() for rank in self.ranks]


class Client:
    """A front end's connections to cores, which are in this process."""

    def __init__(self, *cores: Core) -> None:
        self.cores = dict(zip(range(len(cores)), cores, strict=True))
        self.core_engines = list(self.cores)
        self.calls: list[tuple[int, str]] = []

    async def _call_utility_async(self, method: str, *args: Any, engine: int) -> Any:
        """Errors arrive as texts, and answers some time after the call."""
        self.calls.append((engine, method))
        await asyncio.sleep(0)
        module = name_log if hasattr(name_log, method) else engines
        try:
            sent = msgspec.msgpack.decode(msgspec.msgpack.encode(args))
            found = getattr(module, method)(self.cores[engine], *sent)
        except Exception as error:
            raise Exception(f"Call to {method} method failed: {error}") from None
        await asyncio.sleep(0)
        return msgspec.msgpack.decode(msgspec.msgpack.encode(found))


def control(client: Client, several: bool = False) -> AsyncSteeringControl:
    """The steering control of an API server with its own front end."""
    return AsyncSteeringControl(frontend(not several), Engines(client))


def frontend(alone: bool = True) -> SteeringFrontend:
    """A front end for the core's model, without an engine."""
    model = SteeredModel(dict.fromkeys(range(LAYERS), POINTS), WIDTH, torch.float32)
    made = SteeringFrontend.__new__(SteeringFrontend)
    made.modules = SteeringModules()
    made.admission = SteeringAdmission(model, made.modules, alone)
    made.shared = made.admission.shared
    config = SimpleNamespace(
        architectures=["TinyForCausalLM"],
        model_type="tiny",
        get_text_config=lambda: SimpleNamespace(
            hidden_size=WIDTH, num_hidden_layers=LAYERS
        ),
    )
    made.identity = ModelIdentity("org/tiny", config, digest=lambda: "abc")
    return made
