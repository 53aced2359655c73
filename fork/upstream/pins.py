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
    """The release that the fork is built on."""

    version: str
    revision: str
    wheels: dict[tuple[str, str], WheelPin]
    """By device and machine."""

    def fork_version(self, device: str) -> str:
        """The version of the built distribution.

        Upstream recognises its CPU build by the substring "cpu" in the version.
        """
        suffix = ".cpu" if device == "cpu" else ""
        return f"{self.version}+{self.revision}{suffix}"

    def pin(self, device: str, machine: str) -> WheelPin:
        """The wheel for a device and machine.

        Raises:
            BuildFailure: upstream does not release such a wheel.
        """
        if sys.platform != "linux":
            machine = f"{sys.platform} {machine}"
        pin = self.wheels.get((device, machine))
        if pin is None:
            have = ", ".join(sorted({m for d, m in self.wheels if d == device}))
            raise BuildFailure(
                f"vLLM {self.version} has no {device} wheel for {machine} (there is "
                f"one for Linux on {have}): build upstream {self.version} yourself "
                "and pass the wheel with --wheel FILE"
            )
        return pin


def load_upstream(path: Path) -> Upstream:
    """Read `upstream.toml`."""
    table = tomllib.loads(path.read_text())
    wheels = {
        (device, machine): WheelPin(table[device]["project"], **pin)
        for device in DEVICES
        for machine, pin in table.get(device, {}).items()
        if isinstance(pin, dict)
    }
    return Upstream(table["version"], table["revision"], wheels)


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
