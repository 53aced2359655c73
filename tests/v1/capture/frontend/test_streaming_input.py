# SPDX-License-Identifier: Apache-2.0
import pytest

from vllm.v1.capture.errors import CaptureValidationError
from vllm.v1.capture.frontend.frontend import refuse_streaming_input

ASKED = {"inline": {"hooks": {"post_block": [0]}, "positions": "all"}}


def test_a_session_is_refused_where_every_request_is_captured() -> None:
    with pytest.raises(CaptureValidationError, match="global capture") as caught:
        refuse_streaming_input(None, ["probe"])
    assert caught.value.parameter == "capture"
    assert "probe" in str(caught.value)


def test_a_session_without_a_capture_passes() -> None:
    refuse_streaming_input(None, [])
