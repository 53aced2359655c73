# SPDX-License-Identifier: Apache-2.0
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.v1.residual.engine_call import log_end


@pytest.mark.parametrize("stopping", [True, False])
def test_only_an_engine_that_died_is_an_error(
    caplog: pytest.LogCaptureFixture, stopping: bool
) -> None:
    client: Any = SimpleNamespace(stopping=stopping)
    with caplog.at_level(logging.INFO):
        try:
            raise RuntimeError("closed")
        except RuntimeError:
            log_end(logging.getLogger("engine"), client)
    (record,) = caplog.records
    assert (record.levelname == "INFO") == (record.exc_info is None) == stopping
