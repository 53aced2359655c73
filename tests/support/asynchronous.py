# SPDX-License-Identifier: Apache-2.0
"""Asynchronous scheduling on a CPU, which works but upstream disables."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from vllm.config import VllmConfig
from vllm.platforms.cpu import CpuPlatform


@contextmanager
def allowed() -> Iterator[None]:
    """A context in which an engine gets the scheduling that its arguments request."""
    check = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def keeping(kind: type[CpuPlatform], config: VllmConfig) -> None:
        wanted = config.scheduler_config.async_scheduling
        check(kind, config)
        config.scheduler_config.async_scheduling = wanted

    with patch.object(CpuPlatform, "check_and_update_config", classmethod(keeping)):
        yield
