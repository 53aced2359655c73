# SPDX-License-Identifier: Apache-2.0
"""Our subcommands, which take the engine's options: `vllm capture`, `vllm steer`, ...

The options of such a command are its own and those of an engine. Upstream's modules
and torch take seconds to import, so its own are checked, and listed by `--help`, before
that.
"""

import argparse
import difflib
import importlib
import logging
import multiprocessing
import os
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vllm.entrypoints.cli.types import CLISubcommand

EPILOG = """Options of the engine, such as --dtype or --readout-modules:
vllm {words} --help=all lists them, vllm {words} --help=NAME explains one."""
OURS = "v1/residual/frontend/options.py"
"""The source with the options of the features."""
SERVER = ("entrypoints/launchers/cli_args.py",)
"""The source with the other options of `vllm serve`."""


class Action(NamedTuple):
    """One command, such as `vllm steer sweep`."""

    summary: str
    usage: str
    """What stands before the options, and which are required."""
    module: str
    """In this package: its `add_arguments` declares the options, `check`, if there is
    one, refuses bad ones, early and before `run`, which returns the exit status, or
    None."""
    engine_defaults: Mapping[str, Any] | None = None
    """Defaults of an engine's options; None without such options."""

    def add_parser(self, subparsers: Any, words: str, own: bool) -> Any:
        """Add the command's parser without options."""
        options: dict[str, Any] = {"epilog": EPILOG.format(words=words)}
        if own:
            options |= {"formatter_class": OptionHelp, "allow_abbrev": False}
        parser = subparsers.add_parser(
            words.split()[-1],
            help=self.summary,
            description=self.summary,
            usage=f"vllm {words} {self.usage} [options]",
            **options,
        )
        parser.set_defaults(command_words=words, command_module=self.module)
        return parser

    def add_options(self, parser: Any, only_own: bool) -> None:
        """Add the options; those of an engine, which is slow, unless `only_own`."""
        _module(self.module).add_arguments(parser)
        if self.engine_defaults is None:
            parser.epilog = None
        elif only_own:
            about = "Name or folder of the model."
            if re.search(r"(?<!\()--model", self.usage):
                about += " (required)"
            parser.add_argument("--model", help=about)
        else:
            from vllm.engine.arg_utils import EngineArgs

            EngineArgs.add_cli_args(parser)
            parser.set_defaults(**self.engine_defaults)


class EngineCommand(CLISubcommand):
    """A subcommand of one action, or of several commands."""

    def __init__(
        self, name: str, actions: Action | Mapping[str, Action], summary: str = ""
    ) -> None:
        """A subcommand; `summary` tells of several commands, `actions`, by name."""
        self.name = name
        self._actions = actions
        self._summary = summary

    def subparser_init(self, subparsers: Any, only_own: bool = False) -> Any:
        """Add the parser, and options only of the command that is being run."""
        called = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
        if isinstance(self._actions, Action):
            parser = self._actions.add_parser(subparsers, self.name, only_own)
            if called == self.name:
                self._actions.add_options(parser, only_own)
            return parser
        parser = subparsers.add_parser(
            self.name,
            help=self._summary,
            description=self._summary,
            usage=f"vllm {self.name} {{{','.join(self._actions)}}} [options]",
        )
        commands = parser.add_subparsers(
            required=True,
            dest=f"{self.name}_command",
            prog=f"vllm {self.name}",
            metavar="COMMAND",
        )
        for name, action in self._actions.items() if called == self.name else ():
            command = action.add_parser(commands, f"{self.name} {name}", only_own)
            if name in sys.argv:
                action.add_options(command, only_own)
        return parser

    @staticmethod
    def cmd(args: argparse.Namespace, only_check: bool = False) -> None:
        """Run the command and exit; user errors are printed without a traceback."""
        from vllm.exceptions import VLLMValidationError

        module = _module(args.command_module)
        try:
            if hasattr(module, "check"):
                module.check(args)
            status = None if only_check else module.run(args)
        except VLLMValidationError as error:
            status = f"vllm {args.command_words}: {error}"
        if status is not None:
            sys.exit(status)


def _module(name: str) -> Any:
    return importlib.import_module(f"{__package__}.{name}")


ENGINE: dict[str, Any] = {"model": None}
EAGER = ENGINE | {"enforce_eager": True, "max_steering_configs": 16}
"""The engine runs eagerly for a quick start."""

OWN_COMMANDS = (
    EngineCommand(
        "capture",
        Action(
            "Capture the rows of many prompts into a data set.",
            "SOURCE (--model M | --server URL) --out DIR",
            "capture.options",
            ENGINE,
        ),
    ),
    EngineCommand(
        "check",
        Action(
            "Compare a model's captured rows with the Transformers library.",
            "MODEL",
            "check.run",
            ENGINE,
        ),
    ),
    EngineCommand(
        "patch",
        Action(
            "Patch a prompt with another's rows at every layer and position.",
            "CLEAN CORRUPT (--model M | --server URL) --answer TEXT",
            "patch.run",
            EAGER,
        ),
    ),
    EngineCommand(
        "probe",
        {
            "train": Action(
                "Train a linear probe from labelled texts.",
                "--model M --data FILE --out FILE",
                "probe.train",
                EAGER,
            ),
            "eval": Action(
                "Measure a probe on labelled texts.",
                "FILE --model M --data FILE",
                "probe.eval",
                EAGER,
            ),
        },
        "Train and evaluate probes for readouts.",
    ),
    EngineCommand(
        "steer",
        {
            "extract": Action(
                "Extract vectors from pairs of contrasting texts.",
                "--model M --pairs FILE --out FILE",
                "steer.extract",
                EAGER,
            ),
            "apply": Action(
                "Generate without and with vectors, side by side.",
                "--model M --vectors FILE --prompt TEXT",
                "steer.apply",
                EAGER,
            ),
            "sweep": Action(
                "Try layers and coefficients; a table and a plot.",
                "(--model M | --server URL) --vectors FILE --prompt TEXT",
                "steer.sweep",
                EAGER,
            ),
            "eval": Action(
                "Measure effect and damage against controls, and recommend a dose.",
                "(--model M | --server URL) --vectors FILE --pairs FILE "
                "--harmless FILE",
                "steer.eval",
                EAGER,
            ),
            "convert": Action(
                "Convert vectors between forms, or scale them.",
                "SOURCE TARGET",
                "steer.convert",
            ),
            "show": Action(
                "Show the content of a file of vectors.", "SOURCE", "steer.show"
            ),
        },
        "Get steering vectors and try them out.",
    ),
)


def cmd_init() -> tuple[EngineCommand, ...]:
    """The subcommands of this module."""
    return OWN_COMMANDS


def check_before_torch(argv: list[str]) -> None:
    """As `check_own_options`, before the package `vllm` imports torch.

    Called by each process that imports it, of which only the command itself checks.
    """
    is_command = Path(argv[0]).stem in ("vllm", "vllm-script")
    if is_command and multiprocessing.parent_process() is None:
        check_own_options(argv)
        _checked.append(list(argv))


_checked: list[list[str]] = []
"""The command line, if it was checked before torch was imported."""


def check_own_options(argv: list[str]) -> None:
    """Exit early if the command line has `--help`, or an invalid option of ours.

    Args:
        argv: the command line; negative numbers are joined to their options.

    """
    if argv in _checked:
        return
    if argv[1:2] == ["serve"]:
        check_serve(argv[2:])
    for command in OWN_COMMANDS:
        if argv[1:2] != [command.name]:
            continue
        _quieten()
        argv[:] = join_numbers(argv)
        if any(word.startswith(("--config", "--help=")) for word in argv):
            return
        parser = argparse.ArgumentParser(prog="vllm", add_help=False)
        command.subparser_init(parser.add_subparsers(), only_own=True)
        args, others = parser.parse_known_args(argv[1:])
        for word in others:
            if word.startswith("--") and (meant := misspelt(word)):
                parser.error(f"unrecognized argument: {word}; did you mean {meant}?")
        command.cmd(args, only_check=True)


def check_serve(words: list[str]) -> None:
    """Exit if one of our options among those of `vllm serve` is misspelt, or no number.

    Upstream's parser, which checks all of them, takes seconds to import.
    """
    parser = argparse.ArgumentParser(
        "vllm serve", "%(prog)s MODEL [options]", add_help=False, allow_abbrev=False
    )
    source = (Path(__file__).parents[2] / OURS).read_text("utf-8")
    ours = {}
    for name, hint in re.findall("^    ([a-z_]+): (.*) = ", source, re.MULTILINE):
        option = "--" + name.replace("_", "-")
        choices = re.findall('"([a-z]+)"', hint) or None  # Of a literal.
        kind, nargs = (int, None) if hint.startswith("int") else (str, "*")
        ours[option] = parser.add_argument(
            option, type=kind, nargs=None if choices else nargs, choices=choices
        )
    for word in parser.parse_known_args(words)[1]:
        if word.startswith("--") and (meant := misspelt(word, SERVER)) in ours:
            parser.error(f"unrecognized argument: {word}; did you mean {meant}?")


def misspelt(word: str, more: Sequence[str] = ()) -> str | None:
    """The option that was probably meant by an unknown one, if any is similar.

    Names are read from the sources, because to import an engine's takes seconds.

    Args:
        word: the unknown option.
        more: sources with options beside an engine's and our commands'.

    """
    name = re.split("[=.]", word)[0].replace("_", "-")
    here = Path(__file__).parent
    sources = "engine/arg_utils.py", OURS, *more
    engine = "".join((here.parents[1] / one).read_text("utf-8") for one in sources)
    texts = [engine, *(path.read_text("utf-8") for path in here.glob("*/*.py"))]
    known = {found for text in texts for found in re.findall('"(--[a-z0-9-]+)"', text)}
    fields = re.findall("^    ([a-z0-9_]+): ", engine, re.MULTILINE)
    known |= {"--" + field.replace("_", "-") for field in fields}
    shown = name.replace("--no-", "--", 1)
    if any(one.startswith((name, shown)) for one in known):  # May be shortened.
        return None
    return next(iter(difflib.get_close_matches(name, known, 1, 0.8)), None)


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
