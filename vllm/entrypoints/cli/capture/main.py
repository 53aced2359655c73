# SPDX-License-Identifier: Apache-2.0
"""The command `vllm capture`."""

import argparse
import sys

from vllm.entrypoints.cli.engine_command import EngineCommand
from vllm.entrypoints.cli.types import CLISubcommand


class CaptureSubcommand(EngineCommand):
    """The `capture` subcommand for the vLLM CLI."""

    name = "capture"
    help = "Capture the rows of many prompts into a data set."
    usage = "SOURCE (--model M | --server URL) --out DIR [options]"
    options_module = "vllm.entrypoints.cli.capture.options"

    @staticmethod
    def cmd(args: argparse.Namespace) -> None:
        """Run the command and exit; user errors are printed without a traceback."""
        from vllm.entrypoints.cli.capture.run import run

        sys.exit(run(args))


def cmd_init() -> list[CLISubcommand]:
    """The subcommands of this module."""
    return [CaptureSubcommand()]
