# SPDX-License-Identifier: Apache-2.0
"""Runs the Python code of a page in `docs/interop`, as a user would."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.docs._pages import ROOT, blocks

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Settings for a quick start, which the pages do not need, as in tests/docs.
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONPATH": str(ROOT / "client"),  # `pip install clearbox-client`
    "VLLM_DEFAULT_SERVER_ARGS": '{"enforce_eager": true}',  # of Inspect's servers
}
EAGER = """
from functools import partialmethod
import vllm
vllm.LLM.__init__ = partialmethod(vllm.LLM.__init__, enforce_eager=True)
"""


def code_of(page: str, language: str = "python") -> list[str]:
    """The blocks of a page in one language."""
    return blocks(ROOT / "docs" / "reference" / "interop" / f"{page}.md", language)


def printed_by(folder: Path, code: str) -> str:
    """What a script of this code prints, run in a folder with the examples."""
    (folder / "page.py").write_text(EAGER + code)
    return run(folder, [sys.executable, "page.py"])


def run(folder: Path, command: list[str]) -> str:
    """What a command prints, run in a folder with the examples."""
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    # `vllm`, which Inspect starts, is in the environment below this one.
    site = Path(sysconfig.get_path("purelib"))
    project = next(site.glob("project.pth"), None)
    below = site if project is None else Path(project.read_text().split("'")[1])
    commands = f"{below.parents[2] / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **ENVIRONMENT, "PATH": commands},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout
