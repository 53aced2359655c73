# SPDX-License-Identifier: Apache-2.0
import os

import pytest

from vllm.platforms import current_platform


def test_variables_of_this_fork_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)  # Those of upstream's processes are not known either.
    for name in ("VLLM_STEERING_API_KEY", "VLLM_MAX_BODY_BYTES", "VLLM_ACT_CAPTURE"):
        monkeypatch.setenv(name, "1")
    current_platform.validate_environ(hard_fail=True)
    monkeypatch.setenv("VLLM_STEERING_API_KEYS", "1")
    with pytest.raises(ValueError, match="VLLM_STEERING_API_KEYS"):
        current_platform.validate_environ(hard_fail=True)
