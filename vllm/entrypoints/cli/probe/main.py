# SPDX-License-Identifier: Apache-2.0
"""`vllm probe` and its commands."""

from typing import ClassVar

from vllm.entrypoints.cli.engine_command import CommandGroup
from vllm.entrypoints.cli.types import CLISubcommand


class ProbeSubcommand(CommandGroup):
    """The `probe` subcommand for the vLLM CLI."""

    name = "probe"
    help = "Train and evaluate probes for readouts."
    package = "vllm.entrypoints.cli.probe"
    commands: ClassVar = {
        "train": "Train a linear probe from labelled texts.",
        "eval": "Measure a probe on labelled texts.",
    }
    operands: ClassVar = {
        "train": "--model M --data FILE --out FILE",
        "eval": "FILE --model M --data FILE",
    }


def cmd_init() -> list[CLISubcommand]:
    """The subcommands of this module."""
    return [ProbeSubcommand()]
