# SPDX-License-Identifier: Apache-2.0
"""Subcommands that take the engine's options: of one action, or of several commands."""

import argparse
import importlib
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

from vllm.entrypoints.cli.types import CLISubcommand
from vllm.entrypoints.serve.utils.api_utils import VLLM_SUBCMD_PARSER_EPILOG


class EngineCommand(CLISubcommand):
    """Adds the parser of a subcommand, and its options only if it is being run."""

    help: ClassVar[str]
    usage: ClassVar[str]
    """What follows `vllm` and the subcommand's name."""
    options_module: ClassVar[str]
    """The module whose `add_arguments` declares the options."""

    def subparser_init(self, subparsers: Any) -> Any:
        """Add the parser, and its options if this is the command being run."""
        parser = subparsers.add_parser(
            self.name,
            help=self.help,
            description=self.help,
            usage=f"vllm {self.name} {self.usage}",
            epilog=VLLM_SUBCMD_PARSER_EPILOG.format(subcmd=self.name),
        )
        called = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
        if called == self.name:
            # Adding the engine options is slow.
            from vllm.utils.option_help import list_own_options

            importlib.import_module(self.options_module).add_arguments(parser)
            list_own_options(parser)
        return parser


class CommandGroup(CLISubcommand):
    """A subcommand whose commands are modules with `add_arguments` and `run`."""

    help: ClassVar[str]
    package: ClassVar[str]
    """The package of the modules."""
    commands: ClassVar[Mapping[str, str]]
    """What each command does, by its name."""
    operands: ClassVar[Mapping[str, str]] = {}
    """What stands before the options, by command."""

    def subparser_init(self, subparsers: Any) -> Any:
        """Add the parser, and its commands if this is the subcommand being run."""
        parser = subparsers.add_parser(
            self.name,
            help=self.help,
            description=self.help,
            usage=f"vllm {self.name} {{{','.join(self.commands)}}} [options]",
        )
        commands = parser.add_subparsers(
            required=True,
            dest=f"{self.name}_command",
            prog=f"vllm {self.name}",
            metavar="COMMAND",
        )
        called = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
        for name, summary in self.commands.items() if called == self.name else ():
            words, module = f"{self.name} {name}", f"{self.package}.{name}"
            command = commands.add_parser(
                name,
                help=summary,
                description=summary,
                usage=f"vllm {words} {self.operands.get(name, '')}[options]",
                epilog=VLLM_SUBCMD_PARSER_EPILOG.format(subcmd=words),
            )
            command.set_defaults(command_words=words, command_module=module)
            # Adding the engine options is slow, and only one command runs.
            if name in sys.argv:
                from vllm.utils.option_help import list_own_options

                importlib.import_module(module).add_arguments(command)
                list_own_options(command)
        return parser

    @staticmethod
    def cmd(args: argparse.Namespace) -> None:
        """Run the command; user errors are printed without a traceback."""
        from vllm.exceptions import VLLMValidationError

        try:
            importlib.import_module(args.command_module).run(args)
        except VLLMValidationError as error:
            sys.exit(f"vllm {args.command_words}: {error}")
