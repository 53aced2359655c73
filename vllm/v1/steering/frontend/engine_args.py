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
    _check_switches(args, enabled)
    modules = named_paths(args.steering_modules, "--steering-modules", fail)
    keys = given_values(args.steering_api_key)
    if not enabled:
        for name, value in (("modules", modules), ("api-key", keys)):
            if value:
                raise fail(
                    f"--steering-{name} needs --enable-steering",
                    f"steering_{name.replace('-', '_')}",
                    list(modules) if name == "modules" else "(given)",
                )
    for name in ("max_steering_configs", "max_patch_slots", "max_steering_ops"):
        if (number := getattr(args, name)) < 1:
            option = f"--{name.replace('_', '-')}"
            raise fail(f"{option} must be at least 1", name, number)
    if args.steering_bank_mib < 0:
        raise fail(
            "--steering-bank-mib must not be negative",
            "steering_bank_mib",
            args.steering_bank_mib,
        )
    if enabled and envs.VLLM_USE_RUST_FRONTEND:
        raise fail(
            "--enable-steering: the Rust front end (VLLM_USE_RUST_FRONTEND=1) drops "
            "the fields of steering; unset it to steer",
            "enable_steering",
            True,
        )
    if enabled and current_platform.is_cpu() and library() is None:
        raise fail(
            "--enable-steering: on a CPU the native library carries out operations, "
            "and it was not built; install a C++20 compiler and build the fork again",
            "enable_steering",
            True,
        )
    if enabled and getattr(args, "enable_elastic_ep", False):
        raise fail(
            "--enable-steering: engines that join later (--enable-elastic-ep) would "
            "not have the global vectors; leave out one of the two options",
            "enable_steering",
            True,
        )
    keys += [key for key in [os.environ.get(API_KEY_VARIABLE, "")] if key]
    if not all(key.strip() for key in keys):
        raise fail(
            "--steering-api-key must not be empty", "steering_api_key", "(empty)"
        )
    config = SteeringConfig(
        enabled=enabled,
        max_configs=max(
            args.max_steering_configs,
            args.max_patch_slots if args.enable_patching else 0,
        ),
        max_operations=args.max_steering_ops,
        bank_mib=args.steering_bank_mib,
        modules=modules,
        max_dynamic=_max_dynamic(args.max_dynamic_steering_configs, enabled),
        hooks=args.vllm_lens_api,
        remote_code=args.allow_remote_code_hooks,
    )
    if model_config is not None and named is not None:
        check_files(config, model_config, named)
    return config


def _check_switches(args: "EngineArgs", enabled: bool) -> None:
    """Check the options that need steering, and say what they change."""
    if needless := _needless(args):
        if not enabled:
            raise fail(
                f"{needless[0]} needs --enable-steering",
                needless[0].lstrip("-").replace("-", "_"),
                True,
            )
        logger.info(
            "%s: changes nothing, as requests may have gates at every hook point",
            ", ".join(needless),
        )
    if args.allow_remote_code_hooks:
        _check_remote_code(args.vllm_lens_api)


def _max_dynamic(number: int | None, enabled: bool) -> int:
    if number is None:
        return MAX_DYNAMIC
    name = "max_dynamic_steering_configs"
    if not enabled:
        raise fail(
            "--max-dynamic-steering-configs needs --enable-steering", name, number
        )
    if number < 0:
        raise fail("--max-dynamic-steering-configs must not be negative", name, number)
    return number


def _needless(args: "EngineArgs") -> list[str]:
    """The options given of an earlier fork for what every server that steers can do."""
    given = {
        "--enable-declarative-gates": args.enable_declarative_gates,
        "--enable-cross-layer-monitor": args.enable_cross_layer_monitor,
        "--enable-row-monitor": args.enable_row_monitor,
        "--declarative-probe-sites": bool(args.declarative_probe_sites),
    }
    return [name for name, is_given in given.items() if is_given]


def _check_remote_code(lens_api: bool) -> None:
    if not lens_api:
        raise fail(
            "--allow-remote-code-hooks needs --vllm-lens-api, which sends such hooks",
            "allow_remote_code_hooks",
            True,
        )
    logger.warning(
        "--allow-remote-code-hooks: any client that can send requests to this server "
        "can run any code in its workers. Use it only where every client is trusted"
    )


def given_values(given: Any) -> list[str]:
    """The values of an option or argument, given as a list or as one value."""
    return [given] if isinstance(given, str) else list(given or [])
