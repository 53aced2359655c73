# SPDX-License-Identifier: Apache-2.0
"""Device memory of capture and steering survives the sleep of an engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.models import llama
from vllm.v1.residual import kept_memory
from vllm.v1.residual.kept_memory import KEPT_TAG, is_on_the_host
from vllm.v1.worker import residual_open, residual_worker
from vllm.v1.worker.residual_stream import OpenResidualStream

STAGING = 1_000_003
"""Bytes, of which some do not fill a row."""


class Pools:
    """A stand-in for the allocator of an engine with sleep mode."""

    def __init__(self) -> None:
        self.tag = "weights"
        """Tag of the pool in which the model is loaded."""

    @contextmanager
    def use_memory_pool(self, tag: str) -> Iterator[None]:
        before, self.tag = self.tag, tag
        try:
            yield
        finally:
            self.tag = before


class Allocations(TorchDispatchMode):
    """The pool of each tensor that an operation allocates, in bytes."""

    def __init__(self, pools: Pools) -> None:
        super().__init__()
        self._pools = pools
        self._seen: set[int] = set()
        self.by_tag: dict[str, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            storage = found.untyped_storage()
            if storage.data_ptr() not in self._seen:
                self._seen.add(storage.data_ptr())
                size = self.by_tag.get(self._pools.tag, 0) + storage.nbytes()
                self.by_tag[self._pools.tag] = size
        return found


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Pools:
    """Simulates a GPU whose allocator supports sleep."""
    pools = Pools()
    platform = SimpleNamespace(is_cuda_alike=lambda: True)
    monkeypatch.setattr(kept_memory, "current_platform", platform)
    monkeypatch.setattr(kept_memory, "get_mem_allocator_instance", lambda: pools)
    return pools


@pytest.mark.e2e
def test_all_that_a_worker_allocates_is_kept(
    pools: Pools, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from vllm import LLM

    allocations = Allocations(pools)
    opened: list[Any] = []

    def opening(vllm_config: Any, model: Any, device: Any) -> Any:
        vllm_config.model_config.enable_cumem_allocator = True
        with allocations:
            opened.append(opened_by_runner(vllm_config, model, device))
        vllm_config.model_config.enable_cumem_allocator = False
        return opened[0]

    opened_by_runner = residual_open.open_residual_stream
    monkeypatch.setattr(residual_open, "open_residual_stream", opening)
    llm = LLM(
        str(llama(tmp_path / "llama")),
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        enable_steering=True,
        capture_consumers=["inline"],
        capture_staging_bytes=STAGING,
        enable_readouts=True,
        max_num_seqs=2,
    )
    try:
        (stream,) = opened
        steering, capture = stream.steering, stream._capture
        kept = steering.tables.num_bytes + capture._staging.rows.nbytes
        assert allocations.by_tag.keys() == {KEPT_TAG}
        assert allocations.by_tag[KEPT_TAG] >= kept
        rows = capture._staging.rows
        # What was asked for is all, the third of readouts included.
        assert 0 <= STAGING - rows.nbytes < 3 * rows[0].nbytes
        assert pools.tag == "weights"
    finally:
        llm.llm_engine.engine_core.shutdown()


def test_an_engine_that_cannot_sleep_uses_no_pool(pools: Pools) -> None:
    config: Any = SimpleNamespace(enable_cumem_allocator=False)
    with kept_memory.kept_memory(config):
        assert pools.tag == "weights"


@pytest.mark.parametrize(
    ("tags", "away"),
    [
        (set(), False),
        ({"weights", "kv_cache"}, True),
        ({"weights"}, False),
        ({"kv_cache"}, False),
    ],
)
def test_the_first_wake_up_brings_it_back(tags: set[str], away: bool) -> None:
    assert is_on_the_host(tags) == away


def test_rows_leave_the_device_before_its_memory_does() -> None:
    sent: list[str] = []
    capture: Any = SimpleNamespace(
        send=lambda: sent.append("rows"), readouts=None, staging_facts={}
    )
    graphs: Any = None
    stream = OpenResidualStream({}, capture, None, graphs)
    runner = SimpleNamespace(residual=stream)
    residual_worker.before_sleep(SimpleNamespace(model_runner=runner))
    assert sent == ["rows"]


def test_upstreams_worker_calls_it_before_it_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.worker.gpu_worker import Worker

    calls: list[str] = []
    monkeypatch.setattr(residual_worker, "before_sleep", lambda _: calls.append("rows"))
    monkeypatch.setattr(
        torch.accelerator, "synchronize", lambda *_: calls.append("waits") or stop()
    )

    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        Worker.sleep(object.__new__(Worker), 2)
    assert calls == ["rows", "waits"]
