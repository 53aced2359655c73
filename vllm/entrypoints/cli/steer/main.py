# SPDX-License-Identifier: Apache-2.0
"""`vllm steer` and its commands."""

from typing import ClassVar

from vllm.entrypoints.cli.engine_command import CommandGroup
from vllm.entrypoints.cli.types import CLISubcommand


class SteerSubcommand(CommandGroup):
    """The `steer` subcommand for the vLLM CLI."""

    name = "steer"
    help = "Get steering vectors and try them out."
    package = "vllm.entrypoints.cli.steer"
    commands: ClassVar = {
        "extract": "Extract vectors from pairs of contrasting texts.",
        "apply": "Generate without and with vectors, side by side.",
        "sweep": "Try layers and coefficients; a table and a plot.",
        "eval": "Measure effect and damage against controls, and recommend a dose.",
        "convert": "Convert vectors between forms, or scale them.",
        "show": "Show the content of a file of vectors.",
    }
    operands: ClassVar = {
        "extract": "--model M --pairs FILE --out FILE",
        "apply": "--model M --vectors FILE --prompt TEXT",
        "sweep": "--model M --vectors FILE --prompt TEXT",
        "eval": "--model M --vectors FILE --pairs FILE --harmless FILE",
        "convert": "SOURCE TARGET",
        "show": "SOURCE",
    }


def cmd_init() -> list[CLISubcommand]:
    """The subcommands of this module."""
    return [SteerSubcommand()]
