# SPDX-License-Identifier: Apache-2.0
"""Engine arguments of steering, for tests without an engine."""

from types import SimpleNamespace
from typing import Any

from vllm.v1.residual.frontend.options import EngineOptions


def steering_arguments(**given: Any) -> Any:
    """`EngineArgs` with steering enabled, as far as `steering_config` reads them."""
    return SimpleNamespace(**vars(EngineOptions(enable_steering=True)) | given)
