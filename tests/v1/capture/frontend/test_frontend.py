# SPDX-License-Identifier: Apache-2.0
import pytest

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.capture.frontend.disabled import NO_CAPTURE


def test_without_consumers_a_capture_is_refused_with_the_remedy() -> None:
    params = SamplingParams(capture={"filesystem": {"hooks": {"post_block": [0]}}})
    with pytest.raises(VLLMValidationError, match="--capture-consumers") as caught:
        NO_CAPTURE.admit("r", params, 5)
    assert caught.value.parameter == "capture"
    assert "filesystem" in str(caught.value.value)
    assert isinstance(caught.value, ValueError)


def test_without_consumers_other_requests_pass() -> None:
    NO_CAPTURE.admit("r", SamplingParams(), 5)
