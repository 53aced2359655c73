# SPDX-License-Identifier: Apache-2.0
"""Subcommands of one action that take the engine's options."""

import importlib
import sys
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
