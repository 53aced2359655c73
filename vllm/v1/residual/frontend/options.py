# SPDX-License-Identifier: Apache-2.0
"""The options of the features, which `EngineArgs` inherits.

Upstream's `get_kwargs` makes those of the command line from them; their docstrings are
the help texts, in which no line begins with an option. Otherwise each option stands in
the fields of `EngineArgs` and, with its default again, in a parser.
"""

import argparse
from dataclasses import dataclass, fields
from typing import Any, Literal

_REPEATED = {
    "capture_consumers": "NAME[:key=value,...]",
    "capture_graphsafe_key": "LAYER:HOOK",
    "readout_modules": "NAME=PATH",
    "sae": "NAME=PATH",
    "declarative_probe_sites": "LAYER:HOOK",
    "steering_modules": "NAME=PATH",
    "steering_api_key": "KEY",
}
"""The options that may be given several times, and what follows them."""


@dataclass(kw_only=True)
class CaptureOptions:
    """Activations of the residual stream, delivered to consumers."""

    capture_consumers: list[Any] | None = None
    """A consumer of captured rows, such as filesystem:root=/data/captures; repeatable.
    Values that are JSON are read as JSON; instance_name=... names the instance."""
    mlp_hook_points: bool = False
    """The same as --hook-points mlp_in mlp_out mlp_add."""
    hook_points: list[str] | str | None = None
    """Hook points beside those of the stream, in every layer that has them, by name or
    all; and after: rows behind what is done at any point. A decode step gets slower by
    each, also where it is not used."""
    vllm_lens_api: bool = False
    """Honour the request fields of vllm-lens: adds --enable-steering and the consumer
    vllm_lens."""
    allow_remote_code_hooks: bool = False
    """With --vllm-lens-api: run hook functions that clients send as pickled code. Every
    client can then run any code in the workers."""
    interp_engine_api: bool = False
    """Mount the routes of interp-engine's server: adds --enable-steering, the
    consumer inline and --enable-readouts."""
    enable_lens_page: bool = False
    """Serve a page at `/lens` that shows the running model: tokens tinted by readouts,
    lens, attention, steering, patching and features. It uses the HTTP API only."""
    capture_staging_bytes: int | None = None
    """Device memory for the captured rows of steps; one step captures at most half of
    it, with --enable-readouts a third. Default: room for whole steps at one hook point
    of every layer, at least 256 MiB."""
    capture_host_memory_bytes: int | None = None
    """Most host memory of a worker for captured rows, shared with the front ends.
    Default: a quarter of the machine's memory."""
    capture_dispatch_queue_size: int | None = None
    """Most packets of rows that wait for a consumer."""
    capture_dispatch_queue_bytes: int | None = None
    """Most bytes of rows that wait for a consumer in memory."""
    capture_overload_policy: Literal["block", "drop", "spill"] | None = None
    """The behaviour when a consumer's queue is full: the engine waits, rows are dropped
    (and counted), or they wait on disk."""
    capture_spill_dir: str | None = None
    """Folder in which rows wait under the policy spill."""
    capture_spill_max_bytes: int | None = None
    """Most bytes that a worker spills; beyond that, the engine waits."""
    activation_store_gb: float | None = None
    """Host memory, in GB, in which an engine keeps captured rows of prompts beside the
    prefix cache: a capture of cached blocks is answered without computing them."""
    activation_store_path: str | None = None
    """Folder for rows that leave the memory of --activation-store-gb."""
    activation_store_disk_gb: float | None = None
    """Most GB of rows in --activation-store-path."""
    capture_graphsafe_key: list[str] | None = None
    """Accepted for compatibility; every key is graph-safe."""


@dataclass(kw_only=True)
class ReadoutOptions:
    """Probes, lenses and features, computed on the device."""

    enable_readouts: bool = False
    """Allow readouts in requests; implied by --readout-modules. They take a third
    of --capture-staging-bytes, whose default grows by half."""
    readout_modules: dict[str, str] | list[str] | None = None
    """A named probe or translator from a file; repeatable."""
    sae: dict[str, str] | list[str] | None = None
    """A named sparse autoencoder from a file or folder; repeatable."""


@dataclass(kw_only=True)
class SteeringOptions:
    """Changes to the residual stream, per request or global."""

    enable_steering: bool = False
    """Allow requests to steer hidden states."""
    max_steering_configs: int = 4
    """Most distinct steering configurations in a batch; further requests wait."""
    max_steering_ops: int = 8
    """Most operations of a request at one token and hook point; plain additions are one
    sum and do not count."""
    steering_bank_mib: int = 256
    """Device memory for the vectors of operations in MiB, part of the model's memory.
    Rows for a prompt at all layers take tokens x layers x hidden size x 4 bytes;
    further requests wait."""
    enable_patching: bool = False
    """Keep runs and patch requests from them: adds --enable-steering, the consumer
    patch_source and the slots of --max-patch-slots."""
    max_patch_slots: int = 64
    """With --enable-patching, most differently patched requests in a batch: it raises
    the number of --max-steering-configs."""
    patch_source_cache_bytes: int | None = None
    """With --enable-patching, most bytes of the rows of kept runs; those not used for
    longest are dropped."""
    max_dynamic_steering_configs: int | None = None
    """How many requests consumers may steer by other vectors at a time (4). Given, all
    consumers of a worker may steer; without it only those that run within the step."""
    enable_declarative_gates: bool = False
    """Accepted for compatibility: gates need no option."""
    enable_cross_layer_monitor: bool = False
    """Accepted for compatibility: gates need no option."""
    enable_row_monitor: bool = False
    """Accepted for compatibility: gates need no option."""
    declarative_probe_sites: list[str] | None = None
    """Accepted for compatibility: probes read at any hook point."""
    steering_modules: dict[str, str] | list[str] | None = None
    """Files of named vectors, which requests name in steering_name."""
    steering_api_key: list[str] | None = None
    """A key that permits changes of steering over HTTP; repeatable, so that keys can be
    rotated. Also VLLM_STEERING_API_KEY."""


@dataclass(kw_only=True)
class EngineOptions(CaptureOptions, ReadoutOptions, SteeringOptions):
    """What `EngineArgs` inherits, with arguments that are no options."""

    capture_graphsafe_keys: list[str] | None = None
    """The same as `capture_graphsafe_key`, under an earlier fork's name."""
    capture_consumers_config_override: Any = None
    """Refused, with what to use instead."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options, in the order of the help text."""
    from vllm.engine.arg_utils import get_kwargs

    groups: tuple[tuple[str, type[Any]], ...] = (
        ("capture", CaptureOptions),
        ("readouts", ReadoutOptions),
        ("steering", SteeringOptions),
    )
    for title, options in groups:
        group = parser.add_argument_group(title, options.__doc__)
        derived = get_kwargs(options)
        for one in fields(options):
            kwargs = derived[one.name]
            if metavar := _REPEATED.get(one.name):
                several = one.name == "steering_modules"  # after one option
                action = {"action": "extend"} if several else {"nargs": None}
                kwargs |= {"action": "append", "type": str, "metavar": metavar} | action
            group.add_argument(f"--{one.name.replace('_', '-')}", **kwargs)
