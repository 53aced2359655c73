# SPDX-License-Identifier: Apache-2.0
"""Print the whole fork as one unified diff against upstream."""

import argparse
import shutil
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

from fork.building.builder import build
from fork.building.contents import Added, Text
from fork.commands._options import add_build_options, order_from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_build_options(parser)
    parser.add_argument("--stat", action="store_true", help="count lines per file only")


def run(arguments: argparse.Namespace) -> int:
    """Let git compare the two sides; returns 0."""
    with redirect_stdout(sys.stderr):  # only the diff goes to stdout
        built = build(order_from(arguments))
    with tempfile.TemporaryDirectory() as folder:
        sides = Path(folder, "a"), Path(folder, "b")
        for path, content in built.contents.items():
            if not path.startswith("vllm/") or not isinstance(content, Text | Added):
                continue
            upstream, ours = (side / path for side in sides)
            for target in (upstream, ours):
                target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Added):
                shutil.copyfile(content.path, ours)
            else:
                shutil.copyfile(built.release.root / path, upstream)
                ours.write_bytes(content.data)
        command = ["git", "diff", "--no-index", "--no-prefix"]
        command += ["--stat"] if arguments.stat else []
        status = subprocess.run([*command, "a", "b"], cwd=folder).returncode
    return 0 if status < 2 else status  # 1: there are differences
