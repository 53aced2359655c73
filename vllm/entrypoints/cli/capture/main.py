# SPDX-License-Identifier: Apache-2.0
"""The command `vllm capture`."""

import argparse
import sys
from typing import Any

from vllm.entrypoints.cli.types import CLISubcommand
from vllm.entrypoints.serve.utils.api_utils import VLLM_SUBCMD_PARSER_EPILOG


class CaptureSubcommand(CLISubcommand):
    """The `capture` subcommand for the vLLM CLI."""

    name = "capture"
    help = "Capture the rows of many prompts into a data set."

    def subparser_init(self, subparsers: Any) -> Any:
        """Add the parser, and its options if `capture` is the command being run."""
        parser = subparsers.add_parser(
            self.name,
            help=self.help,
            description=self.help,
            usage="vllm capture SOURCE (--model M | --server URL) --out DIR [options]",
            epilog=VLLM_SUBCMD_PARSER_EPILOG.format(subcmd=self.name),
        )
        called = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
        if called == self.name:
            # Adding the engine options is slow.
            from vllm.entrypoints.cli.capture.options import add_arguments
            from vllm.utils.option_help import list_own_options

            add_arguments(parser)
            list_own_options(parser)
        return parser

    @staticmethod
    def cmd(args: argparse.Namespace) -> None:
        """Run the command and exit; user errors are printed without a traceback."""
        from vllm.entrypoints.cli.capture.run import run

        sys.exit(run(args))


def cmd_init() -> list[CLISubcommand]:
    """The subcommands of this module."""
    return [CaptureSubcommand()]
