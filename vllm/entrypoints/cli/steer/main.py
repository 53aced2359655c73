# SPDX-License-Identifier: Apache-2.0
"""`vllm steer` and its commands."""

import argparse
import importlib
import sys
from typing import Any

from vllm.entrypoints.cli.types import CLISubcommand
from vllm.entrypoints.serve.utils.api_utils import VLLM_SUBCMD_PARSER_EPILOG
from vllm.utils.option_help import list_own_options

COMMANDS = {
    "extract": "Extract vectors from pairs of contrasting texts.",
    "apply": "Generate without and with vectors, side by side.",
    "sweep": "Try layers and coefficients; a table and a plot.",
    "eval": "Measure effect and damage against controls, and recommend a dose.",
    "convert": "Convert vectors between forms, or scale them.",
    "show": "Show the content of a file of vectors.",
}
"""Each command is a module of this package with `add_arguments` and `run`."""

OPERANDS = {"convert": "SOURCE TARGET ", "show": "SOURCE "}


class SteerSubcommand(CLISubcommand):
    """The `steer` subcommand for the vLLM CLI."""

    name = "steer"
    help = "Get steering vectors and try them out."

    def subparser_init(self, subparsers: Any) -> Any:
        """Add the parser, and its commands if `steer` is being run."""
        sys.argv[:] = join_numbers(sys.argv)
        parser = subparsers.add_parser(
            self.name,
            help=self.help,
            description=self.help,
            usage=f"vllm {self.name} {{{','.join(COMMANDS)}}} [options]",
        )
        commands = parser.add_subparsers(
            required=True,
            dest="steer_command",
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
                usage=f"vllm {words} {OPERANDS.get(name, '')}[options]",
                epilog=VLLM_SUBCMD_PARSER_EPILOG.format(subcmd=words),
            )
            # Adding the engine options is slow, and only one command runs.
            if name in sys.argv:
                importlib.import_module(f"{__package__}.{name}").add_arguments(command)
                list_own_options(command)
        return parser

    @staticmethod
    def cmd(args: argparse.Namespace) -> None:
        """Run the command; user errors are printed without a traceback."""
        from vllm.exceptions import VLLMValidationError

        command = importlib.import_module(f"{__package__}.{args.steer_command}")
        try:
            command.run(args)
        except VLLMValidationError as error:
            sys.exit(f"vllm steer {args.steer_command}: {error}")


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
