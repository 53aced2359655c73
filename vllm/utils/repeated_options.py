# SPDX-License-Identifier: Apache-2.0
"""Options that are repeated on the command line, and lists in configuration files."""

import argparse
from collections.abc import Sequence


def repeat_options(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> list[str]:
    """Repeat an option before each of several values, if it accepts one at a time.

    A list in a configuration file becomes `--key a b`. If `--key` takes one value and
    may be repeated, that means `--key a --key b`.
    """
    repeated = {
        name
        for name, action in _repeatable(parser).items()
        if isinstance(action, argparse._AppendAction) and action.nargs is None
    }
    option, values, result = "", 0, []
    for argument in arguments:
        if argument.startswith("--"):
            option, values = argument, 0
        elif option.replace("_", "-") in repeated:
            if values:
                result.append(option)
            values += 1
        result.append(argument)
    return result


def overwritten(parser: argparse.ArgumentParser, names: set[str]) -> set[str]:
    """The options among `names` of which a later value replaces an earlier one."""
    return names - _repeatable(parser).keys()


def _repeatable(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The options of a parser and its subcommands that collect values.

    `vllm` reads configuration files before it chooses the subcommand's parser.
    """
    found: dict[str, argparse.Action] = {
        name: action
        for name, action in parser._option_string_actions.items()
        if isinstance(action, (argparse._AppendAction, argparse._ExtendAction))
    }
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subcommand in action.choices.values():
                found |= _repeatable(subcommand)
    return found
