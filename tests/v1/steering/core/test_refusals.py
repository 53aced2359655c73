# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.v1.engine.core import EngineCore
from vllm.v1.residual.core.engine import NO_CORE
from vllm.v1.steering.core.refusals import WORKER_CALLS
from vllm.v1.steering.errors import SteeringValidationError


def core(called: list[Any]) -> Any:
    def collective_rpc(*given: Any) -> list[Any]:
        called.append(given[0])
        return []

    return SimpleNamespace(
        model_executor=SimpleNamespace(collective_rpc=collective_rpc), residual=NO_CORE
    )


@pytest.mark.parametrize("method", WORKER_CALLS)
def test_calls_of_workers_that_steer_name_what_to_use(method: str) -> None:
    called: list[Any] = []
    with pytest.raises(SteeringValidationError, match=r"/v1/steering"):
        EngineCore.collective_rpc(core(called), method)
    assert not called


def test_other_calls_reach_the_workers() -> None:
    called: list[Any] = []
    EngineCore.collective_rpc(core(called), "sleep")
    EngineCore.collective_rpc(core(called), print)
    assert called == ["sleep", print]
