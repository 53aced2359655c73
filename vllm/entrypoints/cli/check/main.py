# SPDX-License-Identifier: Apache-2.0
"""The command `vllm check`."""

import argparse
import sys
from typing import Any

from vllm.entrypoints.cli.types import CLISubcommand
from vllm.entrypoints.serve.utils.api_utils import VLLM_SUBCMD_PARSER_EPILOG


class CheckSubcommand(CLISubcommand):
    """The `check` subcommand for the vLLM CLI."""

    name = "check"
    help = "Compare a model's captured rows with the Transformers library."

    def subparser_init(self, subparsers: Any) -> Any:
        """Declare the options, only if `check` is what was called."""
        parser = subparsers.add_parser(
            self.name,
            help=self.help,
            description=self.help,
            usage="vllm check MODEL [options]",
            epilog=VLLM_SUBCMD_PARSER_EPILOG.format(subcmd=self.name),
        )
        called = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
        if called == self.name:
            # Engine options take long to declare.
            from vllm.entrypoints.cli.check.run import add_arguments
            from vllm.utils.option_help import list_own_options

            add_arguments(parser)
            list_own_options(parser)
        return parser

    @staticmethod
    def cmd(args: argparse.Namespace) -> None:
        """Run the command; the status is 0 where the rows agree."""
        from vllm.entrypoints.cli.check.run import run

        sys.exit(run(args))


def cmd_init() -> list[CLISubcommand]:
    """The subcommands of this module."""
    return [CheckSubcommand()]
