# SPDX-License-Identifier: Apache-2.0
"""The engine's arguments include capture and steering."""

from fork.language import add_argument, add_field, add_import, before

EDITS = [
    add_import(
        "from vllm.v1.residual.frontend import engine_args as residual_args",
        why="Adds and reads the arguments.",
    ),
    add_field(
        scope="EngineArgs",
        after="aux_output_config",
        insert="""
capture_consumers: list[Any] | None = None
capture_staging_bytes: int | None = None
capture_host_memory_bytes: int | None = None
mlp_hook_points: bool = False
hook_points: list[str] | str | None = None
vllm_lens_api: bool = False
allow_remote_code_hooks: bool = False
interp_engine_api: bool = False
capture_dispatch_queue_size: int | None = None
capture_dispatch_queue_bytes: int | None = None
capture_overload_policy: str | None = None
capture_spill_dir: str | None = None
capture_spill_max_bytes: int | None = None
capture_graphsafe_key: list[str] | None = None
capture_graphsafe_keys: list[str] | None = None
capture_consumers_config_override: Any = None
enable_readouts: bool = False
readout_modules: dict[str, str] | list[str] | None = None
sae: dict[str, str] | list[str] | None = None
enable_steering: bool = False
enable_declarative_gates: bool = False
enable_cross_layer_monitor: bool = False
enable_row_monitor: bool = False
declarative_probe_sites: list[str] | None = None
max_steering_configs: int = 4
enable_patching: bool = False
max_patch_slots: int = 64
patch_source_cache_bytes: int | None = None
max_dynamic_steering_configs: int | None = None
max_steering_ops: int = 8
steering_bank_mib: int = 256
steering_modules: dict[str, str] | list[str] | None = None
steering_api_key: list[str] | None = None
""",
        why="`LLM(...)` and the command line set them.",
    ),
    add_argument(
        scope="EngineArgs.create_engine_config",
        call="VllmConfig",
        argument="capture_config=residual_args.capture_config("
        "self, model_config, scheduler_config)",
        why="Checks the arguments and builds the configuration.",
    ),
    add_argument(
        scope="EngineArgs.create_engine_config",
        call="VllmConfig",
        argument="steering_config=residual_args.steering_config(self, model_config)",
        why="Checks the arguments and builds the configuration.",
    ),
    add_argument(
        scope="EngineArgs.create_engine_config",
        call="VllmConfig",
        argument="readout_config=residual_args.readout_config(self, model_config)",
        why="Checks the arguments and builds the configuration.",
    ),
    before(
        scope="EngineArgs.add_cli_args",
        anchor="return parser",
        insert="residual_args.add_arguments(parser)",
        why="The options of the command line.",
    ),
]
