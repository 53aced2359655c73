# SPDX-License-Identifier: Apache-2.0
"""The configuration of steering, made from the options."""

import os
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.config.steering import MAX_DYNAMIC, SteeringConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.residual.named_paths import named_paths
from vllm.v1.residual.native import library
from vllm.v1.steering.errors import fail
from vllm.v1.steering.frontend.frontend import check_files
from vllm.v1.steering.spec.named import NamedFiles

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.engine.arg_utils import EngineArgs

logger = init_logger(__name__)

API_KEY_VARIABLE = "VLLM_STEERING_API_KEY"


NEEDLESS = (
    "enable_declarative_gates",
    "enable_cross_layer_monitor",
    "enable_row_monitor",
    "declarative_probe_sites",
)
"""Options of an earlier fork for what every server that steers can do."""
NEEDS_STEERING = (
    *NEEDLESS,
    "steering_modules",
    "steering_api_key",
    "max_dynamic_steering_configs",
)
"""Options that change nothing without steering."""
LEAST = {
    "max_steering_configs": 1,
    "max_patch_slots": 1,
    "max_steering_ops": 1,
    "steering_bank_mib": 0,
    "max_dynamic_steering_configs": 0,
}
"""The smallest values of options."""


def steering_config(
    args: "EngineArgs",
    model_config: "ModelConfig | None" = None,
    named: "NamedFiles | None" = None,
) -> SteeringConfig:
    """Create the steering configuration from the engine's arguments.

    Args:
        args: the engine's arguments.
        model_config: the model that vector files must fit; None if it is not known.
        named: the probes and SAEs that entries of these files may name.

    Raises:
        SteeringValidationError: an option is invalid, or needs `--enable-steering`.

    """
    enabled = bool(
        args.enable_steering
        or args.vllm_lens_api
        or args.interp_engine_api
        or args.enable_patching
    )
    _check_options(args, enabled)
    if enabled and (reason := _why_not(args)):
        raise fail(f"--enable-steering: {reason}", "enable_steering", True)
    _check_keys(args)
    dynamic = args.max_dynamic_steering_configs
    config = SteeringConfig(
        enabled=enabled,
        max_configs=max(
            args.max_steering_configs,
            args.max_patch_slots if args.enable_patching else 0,
        ),
        max_operations=args.max_steering_ops,
        bank_mib=args.steering_bank_mib,
        modules=named_paths(args.steering_modules, "--steering-modules", fail),
        max_dynamic=MAX_DYNAMIC if dynamic is None else dynamic,
        hooks=args.vllm_lens_api,
        remote_code=args.allow_remote_code_hooks,
    )
    if model_config is not None and named is not None:
        check_files(config, model_config, named)
    return config


def _check_options(args: "EngineArgs", enabled: bool) -> None:
    """Check options one by one, and say what some of them change."""
    needing = [name for name in NEEDS_STEERING if _is_given(getattr(args, name))]
    for name in needing if not enabled else ():
        value = "(given)" if name == "steering_api_key" else getattr(args, name)
        raise fail(f"{_option(name)} needs --enable-steering", name, value)
    if needless := [_option(name) for name in needing if name in NEEDLESS]:
        logger.info(
            "%s: changes nothing, as requests may have gates at every hook point",
            ", ".join(needless),
        )
    for name, least in LEAST.items():
        number = getattr(args, name)
        if number is not None and number < least:
            raise fail(f"{_option(name)} must be at least {least}", name, number)
    if args.allow_remote_code_hooks and not args.vllm_lens_api:
        raise fail(
            "--allow-remote-code-hooks needs --vllm-lens-api, which sends such hooks",
            "allow_remote_code_hooks",
            True,
        )
    if args.allow_remote_code_hooks:
        logger.warning(
            "--allow-remote-code-hooks: any client that can send requests to this "
            "server can run any code in its workers. Use it only where every client "
            "is trusted"
        )


def _is_given(value: Any) -> bool:
    return bool(value) or type(value) is int  # The number 0 is given, False is not.


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _why_not(args: "EngineArgs") -> str:
    """Why an engine with these options cannot steer; empty if it can."""
    if envs.VLLM_USE_RUST_FRONTEND:
        return (
            "the Rust front end (VLLM_USE_RUST_FRONTEND=1) drops the fields of "
            "steering; unset it to steer"
        )
    if current_platform.is_cpu() and library() is None:
        return (
            "on a CPU the native library carries out operations, and it was not "
            "built; install a C++20 compiler and build the fork again"
        )
    if getattr(args, "enable_elastic_ep", False):
        return (
            "engines that join later (--enable-elastic-ep) would not have the global "
            "vectors; leave out one of the two options"
        )
    return ""


def _check_keys(args: "EngineArgs") -> None:
    keys = given_values(args.steering_api_key)
    keys += [key for key in [os.environ.get(API_KEY_VARIABLE, "")] if key]
    if not all(key.strip() for key in keys):
        raise fail(
            "--steering-api-key must not be empty", "steering_api_key", "(empty)"
        )


def given_values(given: Any) -> list[str]:
    """The values of an option or argument, given as a list or as one value."""
    return [given] if isinstance(given, str) else list(given or [])
