# SPDX-License-Identifier: Apache-2.0
"""Reads the pinned release, and detects the device and the machine to build for."""

import os
import platform
import shutil
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from fork.errors import BuildFailure

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class WheelPin:
    """The wheel of one device and machine."""

    project: str
    file: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Upstream:
    """A release that the fork can be built on."""

    version: str
    revision: str
    wheels: dict[tuple[str, str], WheelPin]
    """By device and machine; empty if the release is not pinned."""

    def fork_version(self, device: str) -> str:
        """The version of the built distribution.

        Upstream recognises its CPU build by the substring "cpu" in the version.
        """
        suffix = ".cpu" if device == "cpu" else ""
        return f"{self.version}+{self.revision}{suffix}"

    def pin(self, device: str, machine: str) -> WheelPin:
        """The wheel for a device and machine.

        Raises:
            BuildFailure: no such wheel is pinned.
        """
        if sys.platform != "linux":
            machine = f"{sys.platform} {machine}"
        pin = self.wheels.get((device, machine))
        if pin is None:
            have = ", ".join(sorted({m for d, m in self.wheels if d == device}))
            known = f"there is one for Linux on {have}" if have else "none is pinned"
            raise BuildFailure(
                f"vLLM {self.version} has no {device} wheel for {machine} ({known}): "
                f"build upstream {self.version} yourself and pass the wheel with "
                "--wheel FILE"
            )
        return pin


def load_upstream(path: Path, version: str | None = None) -> Upstream:
    """Read `upstream.toml`: its default release, or another one."""
    table = tomllib.loads(path.read_text())
    version = version or table["version"]
    wheels = {
        (device, machine): WheelPin(table["projects"][device], **pin)
        for device, machines in table["releases"].get(version, {}).items()
        for machine, pin in machines.items()
    }
    return Upstream(version, table["revision"], wheels)


def machine_name() -> str:
    """This machine's architecture, as in wheel tags."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def default_device() -> str:
    """`VLLM_TARGET_DEVICE`; if unset, `cuda` with an NVIDIA driver, else `cpu`.

    Raises:
        BuildFailure: the variable names another device.
    """
    chosen = os.environ.get("VLLM_TARGET_DEVICE")
    if chosen:
        if chosen not in DEVICES:
            raise BuildFailure(
                f"VLLM_TARGET_DEVICE={chosen!r}: the fork builds for "
                f"{' and '.join(DEVICES)}; set one of them or unset it"
            )
        return chosen
    driver = Path("/proc/driver/nvidia/version")
    return "cuda" if driver.exists() or shutil.which("nvidia-smi") else "cpu"
