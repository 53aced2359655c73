# SPDX-License-Identifier: Apache-2.0
"""`python -m fork COMMAND`: each module of `fork.commands` is a command."""

import argparse
import pkgutil
import sys
from importlib import import_module

import fork.commands
from fork.building.builder import Faulty
from fork.errors import BuildFailure


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m fork", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for info in pkgutil.iter_modules(fork.commands.__path__):
        if info.name.startswith("_"):
            continue
        module = import_module(f"fork.commands.{info.name}")
        summary = (module.__doc__ or "").splitlines()[0]
        command = commands.add_parser(info.name, help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    chosen = parser.parse_args(arguments)
    try:
        return int(chosen.run(chosen))
    except Faulty as failure:
        for fault in failure.faults:
            print(fault.sentence, file=sys.stderr)
        count = len(failure.faults)
        print(f"fork: {count} fault(s), nothing was changed", file=sys.stderr)
    except BuildFailure as failure:
        print(f"fork: {failure}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
