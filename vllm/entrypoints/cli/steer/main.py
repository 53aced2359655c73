# SPDX-License-Identifier: Apache-2.0
"""`vllm steer` and its commands."""

import sys
from typing import Any, ClassVar

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
    operands: ClassVar = {"convert": "SOURCE TARGET ", "show": "SOURCE "}

    def subparser_init(self, subparsers: Any) -> Any:
        """Add the parser, after joining negative numbers to their options."""
        sys.argv[:] = join_numbers(sys.argv)
        return super().subparser_init(subparsers)


def join_numbers(words: list[str]) -> list[str]:
    """Join `--scales -0.5` to `--scales=-0.5`.

    Upstream's parser would read `-0.5` as an option with a dotted name.
    """
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in ("--scale", "--scales") and word.startswith("-"):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def cmd_init() -> list[CLISubcommand]:
    """The subcommands of this module."""
    return [SteerSubcommand()]
