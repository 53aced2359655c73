# SPDX-License-Identifier: Apache-2.0
import logging
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.residual.engine_call import outputs_ended


@pytest.mark.parametrize("stopping", [True, False])
def test_only_an_engine_that_died_is_an_error_and_calls_of_either_end(
    caplog: pytest.LogCaptureFixture, stopping: bool
) -> None:
    done, waiting = Future[int](), Future[int]()
    done.set_result(7)
    results = {1: done, 2: waiting}
    client: Any = SimpleNamespace(stopping=stopping, utility_results=results)
    with caplog.at_level(logging.INFO):
        try:
            raise RuntimeError("closed")
        except RuntimeError:
            outputs_ended(logging.getLogger("engine"), client)
    (record,) = caplog.records
    assert (record.levelname == "INFO") == (record.exc_info is None) == stopping
    assert done.result() == 7
    assert isinstance(waiting.exception(timeout=0), EngineDeadError)
