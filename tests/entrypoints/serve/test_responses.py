# SPDX-License-Identifier: Apache-2.0
import logging

import pytest

from vllm.entrypoints.serve.utils.responses import log_error
from vllm.v1.capture.errors import fail


def test_only_a_fault_of_the_server_has_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("a stream")
    with caplog.at_level(logging.INFO):
        log_error(logger, "Error in stream.", fail("x must be a layer", "x", 1))
        log_error(logger, "Error in stream.", RuntimeError("broken"))
    refused, failed = caplog.records
    assert refused.exc_info is None and "x must be a layer" in refused.getMessage()
    assert failed.exc_info is not None and failed.levelname == "ERROR"
