# SPDX-License-Identifier: Apache-2.0
"""A virtual environment per peer library, on top of the project's own.

    python -m tests.interop.environment PEER

makes `build/interop/PEER` from `tests/interop/PEER/requirements.txt` if it is not there
or the file has changed, and prints its Python. It sees the packages of the environment
that runs this; its own come first.
"""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]


def prepare(peer: str) -> Path:
    """The Python of a peer's environment.

    Raises:
        FileNotFoundError: if the peer has no requirements.

    """
    requirements = Path(__file__).parent / peer / "requirements.txt"
    wanted = requirements.read_text()
    folder = ROOT / "build" / "interop" / peer
    python, mark = folder / "bin" / "python", folder / "requirements.txt"
    if mark.exists() and mark.read_text() == wanted:
        return python
    venv.create(folder, clear=True, with_pip=True)
    site = sysconfig.get_path("purelib")
    own = next(folder.glob("lib/python*/site-packages"))
    (own / "project.pth").write_text(f"import site; site.addsitedir({site!r})\n")
    install = [python, "-m", "pip", "install", "--quiet", "-r", requirements]
    subprocess.run(install, check=True)
    mark.write_text(wanted)
    return python


if __name__ == "__main__":
    print(prepare(sys.argv[1]))
