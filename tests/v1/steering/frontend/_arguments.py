# SPDX-License-Identifier: Apache-2.0
"""Engine arguments of steering, for tests without an engine."""

from types import SimpleNamespace
from typing import Any


def steering_arguments(**given: Any) -> Any:
    """`EngineArgs` with steering enabled, as far as `steering_config` reads them."""
    defaults = {
        "enable_steering": True,
        "max_steering_configs": 1,
        "max_steering_ops": 8,
        "steering_bank_mib": 256,
        "vllm_lens_api": False,
        "allow_remote_code_hooks": False,
        "max_dynamic_steering_configs": None,
        "enable_declarative_gates": False,
        "enable_cross_layer_monitor": False,
        "enable_row_monitor": False,
        "declarative_probe_sites": None,
        "interp_engine_api": False,
        "enable_patching": False,
        "max_patch_slots": 64,
        "steering_modules": None,
        "steering_api_key": None,
    }
    return SimpleNamespace(**defaults | given)
