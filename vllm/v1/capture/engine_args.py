# SPDX-License-Identifier: Apache-2.0
"""The `CaptureConfig` that is made from the options."""

import os
import shutil
from collections.abc import Collection, Mapping
from itertools import count
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import vllm.envs as envs
from vllm.config.capture import (
    CaptureConfig,
    ConsumerConfig,
    parse_consumer,
    prepare_folder,
)
from vllm.config.capture_consumers import expand_graphsafe_keys
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.capture.capabilities import (
    has_own_name,
    name_of,
    runs_in_steps,
    truncates,
)
from vllm.v1.capture.errors import CaptureValidationError
from vllm.v1.capture.registry import (
    check_consumer,
    check_params,
    consumer_class,
)
from vllm.v1.residual.sizes import default_staging_bytes, num_layers, row_bytes
from vllm.v1.residual.tap import AFTER, HOOK_NAMES, MLP_POINTS, OPTIONAL_POINTS

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SchedulerConfig
    from vllm.engine.arg_utils import EngineArgs

logger = init_logger(__name__)

SWITCH = "VLLM_ACT_CAPTURE"


def consumers_of_variables(
    environment: Mapping[str, str] = os.environ,
) -> list[dict[str, Any]]:
    """The consumers that the variables ask for, in the form of `capture_consumers`.

    Raises:
        CaptureValidationError: a variable is invalid; names it, its value and the
            remedy.

    """
    if environment.get(SWITCH, "") in ("", "0"):
        return []
    from vllm.interop.activation_capture.variables import consumer_of

    consumer = consumer_of(environment)
    return [] if consumer is None else [consumer]


_OPTIONS = (
    *("host_memory_bytes", "dispatch_queue_size", "dispatch_queue_bytes"),
    *("overload_policy", "spill_dir", "spill_max_bytes"),
)
"""Fields of the configuration that are options named `capture_FIELD`."""

_READY: dict[str, dict[str, Any]] = {}
"""Ready-made consumer instances of this process, by `CaptureConfig.driver_key`.

Instances cannot be pickled with the configuration, which travels to other processes.
"""


def capture_config(
    args: "EngineArgs",
    model_config: "ModelConfig",
    scheduler_config: "SchedulerConfig",
) -> CaptureConfig:
    """Build the capture configuration from the engine's arguments.

    Raises:
        CaptureValidationError: (a `ValueError`) a consumer is unknown, malformed or not
            a consumer, or an option is invalid.

    """
    _check_override(args.capture_consumers_config_override)
    entries = [parse_consumer(one) for one in consumers_of_variables()]
    ready: dict[str, Any] = {}
    given: Any = args.capture_consumers or []
    for entry in given if isinstance(given, (list, tuple)) else [given]:
        if isinstance(entry, type):
            raise CaptureValidationError(
                f"capture consumer {entry.__name__!r} is a class; give an instance, "
                f"{entry.__name__}(None, {{}}), or the name of its entry point",
                parameter="capture_consumers",
                value=entry.__name__,
            )
        if isinstance(entry, (str, dict)):
            entries.append(parse_consumer(entry))
        else:
            name = name_of(entry)
            check_consumer(entry, name)
            if entry.location != "driver":
                raise CaptureValidationError(
                    f"capture consumer {name!r}: a ready instance must have location "
                    '"driver", as workers are other processes; give its class an '
                    "entry point, or set its location",
                    parameter="capture_consumers",
                    value=name,
                )
            ready[_free_name(entry, name, ready)] = entry
    if args.vllm_lens_api:
        entries.append(ConsumerConfig("vllm_lens"))
    if args.interp_engine_api and not _has(entries, "inline"):
        entries.append(ConsumerConfig("inline"))
    entries += _patch_sources(args, entries)
    steps = [one for one in entries if runs_in_steps(consumer_class(one.name))]
    entries = [entry for entry in entries if entry not in steps]
    if steps:
        _check_steps(args, steps)
    key = ""
    if ready:
        key = uuid4().hex
        _READY[key] = ready
    staging = args.capture_staging_bytes
    reads = args.enable_readouts or args.interp_engine_api or bool(steps)
    reads = bool(reads or args.readout_modules)
    takes = bool(entries or ready or reads)
    if staging is None and takes and current_platform.is_cuda_alike():
        memory = current_platform.get_device_total_memory()
        staging = default_staging_bytes(
            row_bytes(model_config),
            num_layers(model_config),
            scheduler_config.max_num_batched_tokens,
            int(memory * args.gpu_memory_utilization),
            3 if reads else 2,
        )
    chosen = {name: getattr(args, f"capture_{name}") for name in _OPTIONS}
    chosen["staging_bytes"] = staging
    chosen |= _store_options(args)
    config = CaptureConfig(
        consumers=entries,
        step_consumers=steps,
        takes_actions=_takes_actions(args, steps),
        driver_instances=list(ready),
        driver_truncating=[name for name, one in ready.items() if truncates(one)],
        driver_key=key,
        optional_points=_optional_points(args),
        readouts=reads,
        graphsafe_keys=[
            *_texts(args.capture_graphsafe_key),
            *_texts(args.capture_graphsafe_keys),
        ],
        **{name: value for name, value in chosen.items() if value is not None},
    )
    if config.enabled and envs.VLLM_USE_RUST_FRONTEND:
        raise CaptureValidationError(
            "capture_consumers: the Rust front end (VLLM_USE_RUST_FRONTEND=1) drops "
            "the fields of captures; unset it to capture",
            parameter="capture_consumers",
            value=[entry.instance_name for entry in config.consumers],
        )
    _check_room(config, model_config)
    for consumer in config.consumers:
        check_params(consumer)
    _check_graphsafe_keys(config.graphsafe_keys, model_config)
    _check_spill(config, chosen)
    _check_store(config)
    return config


def _store_options(args: "EngineArgs") -> dict[str, Any]:
    """The fields of the activation store.

    Raises:
        CaptureValidationError: an option is invalid, or lacks another.

    """
    names = ("activation_store_gb", "activation_store_path", "activation_store_disk_gb")
    memory, folder, disk = (getattr(args, name) for name in names)

    def refused(name: str, why: str) -> CaptureValidationError:
        value = getattr(args, name)
        option = f"--{name.replace('_', '-')}"
        message = f"{option} {value!r}: {why}"
        return CaptureValidationError(message, parameter=name, value=value)

    for name, size in ((names[0], memory), (names[2], disk)):
        is_number = isinstance(size, (int, float)) and not isinstance(size, bool)
        if size is not None and not (is_number and 0 < size < inf):
            raise refused(name, "it must be a number above 0")
    if memory is None and (folder is not None or disk is not None):
        name = names[1] if folder is not None else names[2]
        raise refused(name, "it needs --activation-store-gb, the memory in front of it")
    if (folder is None) != (disk is None):
        name, other = (names[1:], names[:0:-1])[folder is None]
        raise refused(name, f"it needs --{other.replace('_', '-')}")
    if memory is not None and args.enable_prefix_caching is False:
        raise refused(
            names[0],
            "stored rows belong to blocks of the prefix cache, which is off; leave out "
            "--no-enable-prefix-caching, or this",
        )
    return {
        "store_bytes": int((memory or 0) * 1e9),
        "store_path": folder or "",
        "store_disk_bytes": int((disk or 0) * 1e9),
    }


def _prepare(folder: str, parameter: str) -> None:
    """Create the folder that an option names; refuse one that cannot be written to."""
    try:
        prepare_folder(Path(folder))
    except OSError as error:
        raise CaptureValidationError(
            f"--{parameter.replace('_', '-')} {folder!r} cannot be written to: {error}"
            ". Name a folder that can",
            parameter=parameter,
            value=folder,
        ) from error


def _check_store(config: CaptureConfig) -> None:
    """Refuse a store that nothing fills, or whose folder cannot be written to."""
    if config.store_bytes and not (config.consumers or config.driver_instances):
        raise CaptureValidationError(
            "--activation-store-gb needs a consumer of rows; add --capture-consumers "
            "NAME",
            parameter="activation_store_gb",
            value=config.store_bytes / 1e9,
        )
    if config.store_path:
        _prepare(config.store_path, "activation_store_path")
        free = shutil.disk_usage(config.store_path).free
        if config.store_disk_bytes > free:
            # Rows that cannot be written stay in memory, beyond its limit.
            raise CaptureValidationError(
                f"--activation-store-disk-gb {config.store_disk_bytes / 1e9:g}: the "
                f"disk of --activation-store-path {config.store_path!r} has "
                f"{free / 1e9:.3g} GB free; give less than that, or another folder",
                parameter="activation_store_disk_gb",
                value=config.store_disk_bytes / 1e9,
            )


def _check_room(config: CaptureConfig, model_config: "ModelConfig") -> None:
    """Refuse staging memory that has no room for a row of the stream."""
    if config.enabled:
        config.rows_per_step(row_bytes(model_config))


def _optional_points(args: "EngineArgs") -> list[str]:
    """The enabled hook points beside those of the stream, in a fixed order."""
    wanted: set[str] = {*MLP_POINTS, "mlp_add"} if args.mlp_hook_points else set()
    for name in _texts(args.hook_points):
        if name == "all":
            wanted.update(OPTIONAL_POINTS)
        elif name in (*OPTIONAL_POINTS, AFTER):
            wanted.add(name)
        elif name not in HOOK_NAMES:
            raise CaptureValidationError(
                f"hook_points: {name!r} is not a hook point; those that are added by "
                f"name are {list(OPTIONAL_POINTS)}, and 'all' is all of them; "
                f"{AFTER!r} adds rows behind interventions",
                parameter="hook_points",
                value=name,
            )
    return [name for name in (*OPTIONAL_POINTS, AFTER) if name in wanted]


def _takes_actions(args: "EngineArgs", steps: list[ConsumerConfig]) -> bool:
    """Whether consumers may steer: those within the step, or all of a single rank.

    Not without being asked, as blocks with generated tokens are not shared then.
    """
    if steps or args.max_dynamic_steering_configs is None:
        return bool(steps)
    ranks = args.tensor_parallel_size * args.pipeline_parallel_size
    if ranks * args.data_parallel_size > 1:
        raise CaptureValidationError(
            f"max_dynamic_steering_configs: with {ranks * args.data_parallel_size} "
            "ranks only consumers that run within the step can steer; derive one from "
            "SyncCaptureConsumer, or leave the option out",
            parameter="max_dynamic_steering_configs",
            value=args.max_dynamic_steering_configs,
        )
    return True


def _check_steps(args: "EngineArgs", steps: list[ConsumerConfig]) -> None:
    """Refuse configurations in which steps do not follow one another.

    With several stages the scheduler passes actions on, so it must have the output of a
    request's step before its next step.
    """
    names = [entry.instance_name for entry in steps]
    remedy = ""
    if args.data_parallel_size > 1:
        remedy = "leave out data_parallel_size"
    elif args.speculative_config is not None:
        remedy = "leave out speculative_config"
    elif args.pipeline_parallel_size > 1 and args.async_scheduling is not False:
        remedy = (
            "add --no-async-scheduling (async_scheduling=False), which they need with "
            "pipeline_parallel_size"
        )
    if remedy:
        raise CaptureValidationError(
            f"capture consumers {names} run within each step, which needs one engine "
            f"without drafts; {remedy}, or steer by entries with `when`",
            parameter="capture_consumers",
            value=names,
        )


def _has(entries: list[ConsumerConfig], name: str) -> bool:
    """Whether there is an instance of this name."""
    return any(entry.instance_name == name for entry in entries)


def _patch_sources(
    args: "EngineArgs", entries: list[ConsumerConfig]
) -> list[ConsumerConfig]:
    """The consumer that `--enable-patching` adds."""
    most = args.patch_source_cache_bytes
    if not args.enable_patching:
        if most is not None:
            raise CaptureValidationError(
                "--patch-source-cache-bytes needs --enable-patching",
                parameter="patch_source_cache_bytes",
                value=most,
            )
        return []
    if _has(entries, "patch_source"):
        return []
    params = {} if most is None else {"max_bytes": most}
    return [ConsumerConfig("patch_source", params=params)]


def _free_name(entry: Any, name: str, taken: Collection[str]) -> str:
    """The name of a ready instance: the second of a class is `Class#2`.

    Raises:
        CaptureValidationError: both have said that they are called so.

    """
    if name not in taken:
        return name
    if has_own_name(entry):
        raise CaptureValidationError(
            f"two capture consumers are named {name!r}; give one of them another "
            "`instance_name`",
            parameter="capture_consumers",
            value=name,
        )
    return next(one for n in count(2) if (one := f"{name}#{n}") not in taken)


def ready_instances(config: CaptureConfig) -> dict[str, Any]:
    """The ready-made instances that `config` was created with, by instance name."""
    return _READY.get(config.driver_key, {})


def _check_spill(config: CaptureConfig, chosen: dict[str, Any]) -> None:
    if not config.enabled:
        return
    if config.overload_policy == "spill":
        _prepare(str(config.spill_folder), "capture_spill_dir")
    elif chosen["spill_dir"] is not None or chosen["spill_max_bytes"] is not None:
        logger.warning(
            "--capture-spill-dir and --capture-spill-max-bytes have no effect under "
            "--capture-overload-policy %s",
            config.overload_policy,
        )


def _check_override(value: object) -> None:
    """Refuse an argument of the reference fork's `EngineArgs`."""
    if value is not None:
        raise CaptureValidationError(
            "capture_consumers_config_override is not supported; give its consumers as "
            "capture_consumers=[...], a list of texts, objects or ready instances",
            parameter="capture_consumers_config_override",
            value=type(value).__name__,
        )


def _texts(given: list[str] | str | None) -> list[str]:
    """One text, or several, as a list."""
    return [given] if isinstance(given, str) else list(given or ())


def _check_graphsafe_keys(keys: list[str], model_config: "ModelConfig") -> None:
    if not keys:
        return
    try:
        expand_graphsafe_keys(keys, num_layers(model_config))
    except ValueError as error:
        raise CaptureValidationError(
            f"--capture-graphsafe-key {error}",
            parameter="capture_graphsafe_key",
            value=" ".join(keys),
        ) from None
    logger.info(
        "--capture-graphsafe-key has no effect: every key is captured inside CUDA "
        "graphs"
    )
