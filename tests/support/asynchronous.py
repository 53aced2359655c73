# SPDX-License-Identifier: Apache-2.0
"""Asynchronous scheduling on a CPU: it works there, but upstream switches it off."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from vllm.config import VllmConfig
from vllm.platforms.cpu import CpuPlatform


@contextmanager
def allowed() -> Iterator[None]:
    """Within, an engine gets the scheduling that its arguments ask for."""
    check = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def keeping(kind: type[CpuPlatform], config: VllmConfig) -> None:
        wanted = config.scheduler_config.async_scheduling
        check(kind, config)
        config.scheduler_config.async_scheduling = wanted

    with patch.object(CpuPlatform, "check_and_update_config", classmethod(keeping)):
        yield
