# SPDX-License-Identifier: Apache-2.0
"""Subcommands that take the engine's options: of one action, or of several commands.

The options of such a command are its own and those of an engine. Upstream's modules
take several seconds to import, so its own are checked, and listed by `--help`, before
that.
"""

import argparse
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

from vllm.entrypoints.cli.types import CLISubcommand

OWN_COMMANDS = ("capture", "check", "probe", "steer")
"""Each is a package with a module `main`, in this folder."""
EPILOG = """Options of the engine, such as --dtype or --readout-modules:
vllm {words} --help=all lists them, vllm {words} --help=NAME explains one."""


def check_own_options(argv: list[str]) -> None:
    """Exit early if the command line has `--help`, or an invalid option of ours.

    Args:
        argv: the command line; negative numbers are joined to their options.

    """
    if len(argv) < 2 or argv[1] not in OWN_COMMANDS:
        return
    _quieten()
    argv[:] = join_numbers(argv)
    elsewhere = ("--config", "--help=")
    if any(word.startswith(elsewhere) for word in argv):
        return
    (command,) = importlib.import_module(f"{__package__}.{argv[1]}.main").cmd_init()
    parser = argparse.ArgumentParser(prog="vllm", add_help=False)
    command.subparser_init(parser.add_subparsers(), only_own=True)
    parser.parse_known_args(argv[1:])


def _quieten() -> None:
    """Hide upstream's log and the warnings of libraries, unless they are asked for."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if os.environ.setdefault("PYTHONWARNINGS", "ignore") == "ignore":
        warnings.simplefilter("ignore")
    if os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR") == "ERROR":
        logging.getLogger("vllm").setLevel(logging.ERROR)


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


class OptionHelp(argparse.HelpFormatter):
    """Says of each option whether it is required, or what its default is."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        if action.required and action.option_strings:
            return f"{text} (required)"
        is_told = "default" in text.lower() or not action.option_strings
        plain = isinstance(action.default, str | int | float) and action.default
        if is_told or not plain or action.default == argparse.SUPPRESS:
            return text
        return f"{text} (default: %(default)s)"


def _add_parser(
    subparsers: Any, words: str, usage: str, summary: str, own: bool
) -> Any:
    """Add the parser of a command, such as `steer sweep`."""
    options: dict[str, Any] = {"epilog": EPILOG.format(words=words)}
    if own:
        options |= {"formatter_class": OptionHelp, "allow_abbrev": False}
    return subparsers.add_parser(
        words.split()[-1],
        help=summary,
        description=summary,
        usage=f"vllm {words} {usage}",
        **options,
    )


def _add_options(parser: Any, module: str, only_own: bool) -> None:
    """Add the options that a module declares, and those of an engine if it has one."""
    declared = importlib.import_module(module)
    declared.add_arguments(parser)
    defaults = getattr(declared, "ENGINE_DEFAULTS", None)
    if defaults is None:
        parser.epilog = None
    elif only_own:
        parser.add_argument("--model", help="Name or folder of the model.")
    else:
        from vllm.engine.arg_utils import EngineArgs

        EngineArgs.add_cli_args(parser)
        parser.set_defaults(**defaults)


class EngineCommand(CLISubcommand):
    """Adds the parser of a subcommand, and its options only if it is being run."""

    help: ClassVar[str]
    usage: ClassVar[str]
    """What follows `vllm` and the subcommand's name."""
    options_module: ClassVar[str]
    """The module whose `add_arguments` declares the options, and whose
    `ENGINE_DEFAULTS` are defaults of those of an engine."""

    def subparser_init(self, subparsers: Any, only_own: bool = False) -> Any:
        """Add the parser, and its options if this is the command being run."""
        parser = _add_parser(subparsers, self.name, self.usage, self.help, only_own)
        called = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
        if called == self.name:
            # Adding the engine options is slow.
            _add_options(parser, self.options_module, only_own)
        return parser


class CommandGroup(CLISubcommand):
    """A subcommand whose commands are modules with `add_arguments` and `run`."""

    help: ClassVar[str]
    package: ClassVar[str]
    """The package of the modules."""
    commands: ClassVar[Mapping[str, str]]
    """What each command does, by its name."""
    operands: ClassVar[Mapping[str, str]] = {}
    """What stands before the options, and which are required, by command."""

    def subparser_init(self, subparsers: Any, only_own: bool = False) -> Any:
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
            usage = f"{self.operands.get(name, '')} [options]".strip()
            command = _add_parser(commands, words, usage, summary, only_own)
            command.set_defaults(command_words=words, command_module=module)
            # Adding the engine options is slow, and only one command runs.
            if name in sys.argv:
                _add_options(command, module, only_own)
        return parser

    @staticmethod
    def cmd(args: argparse.Namespace) -> None:
        """Run the command; user errors are printed without a traceback."""
        from vllm.exceptions import VLLMValidationError

        try:
            importlib.import_module(args.command_module).run(args)
        except VLLMValidationError as error:
            sys.exit(f"vllm {args.command_words}: {error}")
