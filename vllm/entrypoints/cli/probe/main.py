# SPDX-License-Identifier: Apache-2.0
"""`vllm probe` and its commands."""

import argparse
import importlib
import sys
from typing import Any

from vllm.entrypoints.cli.types import CLISubcommand
from vllm.entrypoints.serve.utils.api_utils import VLLM_SUBCMD_PARSER_EPILOG

COMMANDS = {"train": "Train a linear probe from labelled texts."}
"""Each command is a module of this package with `add_arguments` and `run`."""


class ProbeSubcommand(CLISubcommand):
    """The `probe` subcommand for the vLLM CLI."""

    name = "probe"
    help = "Train probes for readouts."

    def subparser_init(self, subparsers: Any) -> Any:
        """Add the parser, and its commands if `probe` is being run."""
        parser = subparsers.add_parser(
            self.name,
            help=self.help,
            description=self.help,
            usage=f"vllm {self.name} {{{','.join(COMMANDS)}}} [options]",
        )
        commands = parser.add_subparsers(
            required=True,
            dest="probe_command",
            prog=f"vllm {self.name}",
            metavar="COMMAND",
        )
        called = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
        for name, summary in COMMANDS.items() if called == self.name else ():
            words = f"{self.name} {name}"
            command = commands.add_parser(
                name,
                help=summary,
                description=summary,
                usage=f"vllm {words} [options]",
                epilog=VLLM_SUBCMD_PARSER_EPILOG.format(subcmd=words),
            )
            importlib.import_module(f"{__package__}.{name}").add_arguments(command)
        return parser

    @staticmethod
    def cmd(args: argparse.Namespace) -> None:
        """Run the command; user errors are printed without a traceback."""
        from vllm.exceptions import VLLMValidationError

        command = importlib.import_module(f"{__package__}.{args.probe_command}")
        try:
            command.run(args)
        except VLLMValidationError as error:
            sys.exit(f"vllm probe {args.probe_command}: {error}")


def cmd_init() -> list[CLISubcommand]:
    """The subcommands of this module."""
    return [ProbeSubcommand()]
