# SPDX-License-Identifier: Apache-2.0
"""The engine's arguments include capture and steering."""

from fork.language import add_argument, add_base, add_import, before

EDITS = [
    add_import(
        "from vllm.v1.residual.frontend import engine_args as residual_args",
        why="Adds and reads the arguments.",
    ),
    add_base(
        scope="EngineArgs",
        base="residual_args.EngineOptions",
        why="`LLM(...)` and the command line set the features' options.",
    ),
    add_argument(
        scope="EngineArgs.create_engine_config",
        call="VllmConfig",
        argument="**residual_args.configs(self, model_config, scheduler_config)",
        why="Checks the arguments and builds the features' configurations.",
    ),
    before(
        scope="EngineArgs.add_cli_args",
        anchor="return parser",
        insert="residual_args.add_arguments(parser)",
        why="The options of the command line.",
    ),
]
