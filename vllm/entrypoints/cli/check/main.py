# SPDX-License-Identifier: Apache-2.0
"""The command `vllm check`."""

import argparse
import sys

from vllm.entrypoints.cli.engine_command import EngineCommand
from vllm.entrypoints.cli.types import CLISubcommand


class CheckSubcommand(EngineCommand):
    """The `check` subcommand for the vLLM CLI."""

    name = "check"
    help = "Compare a model's captured rows with the Transformers library."
    usage = "MODEL [options]"
    options_module = "vllm.entrypoints.cli.check.run"

    @staticmethod
    def cmd(args: argparse.Namespace) -> None:
        """Run the command; the status is 0 where the rows agree."""
        from vllm.entrypoints.cli.check.run import run

        sys.exit(run(args))


def cmd_init() -> list[CLISubcommand]:
    """The subcommands of this module."""
    return [CheckSubcommand()]
