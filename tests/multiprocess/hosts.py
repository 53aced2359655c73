# SPDX-License-Identifier: Apache-2.0
"""Network namespaces as hosts, on one machine.

Each has its own network, host name, `/dev/shm` and folder for temporary files, so that
processes of two of them share no sockets and no memory. Files elsewhere are common.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

TEMPORARY = "/dev/shm"
"""The folder for temporary files, which each host has for itself."""
ENTER = """set -e
hostname "$0"
mount -t tmpfs none /dev/shm
echo "127.0.0.1 localhost $0" > /dev/shm/.hosts
: > /dev/shm/.resolv.conf
mount --bind /dev/shm/.hosts /etc/hosts
mount --bind /dev/shm/.resolv.conf /etc/resolv.conf
exec "$@"
"""
"""Names are looked up in `/etc/hosts` alone: a name server would be waited for."""
HOME = "home"
"""The link from a host to this process's network."""


class Hosts:
    """Two hosts that are connected with each other; the first also with us."""

    def __init__(self, number: int) -> None:
        """Name the hosts; `number` distinguishes those of several test runs."""
        self._network = f"198.18.{number % 250}"
        self.names = [f"node{number}-{index}" for index in range(2)]
        self.addresses = [f"{self._network}.1", f"{self._network}.2"]
        self.url = f"http://{self._network}.130:8000"
        self._home = f"h{number}"

    def open(self) -> None:
        """Create the namespaces and their links."""
        first, second = self.names
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        link("veth0", "netns", first, "veth0", "netns", second)
        link(self._home, "", "", HOME, "netns", first)
        for name, address in zip(self.names, self.addresses, strict=True):
            up(f"{address}/25", "veth0", "-n", name)
        up(f"{self._network}.130/25", HOME, "-n", first)
        up(f"{self._network}.129/25", self._home)

    def close(self) -> None:
        """Delete the namespaces, and the links with them."""
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False)

    def command(self, index: int, command: Sequence[str]) -> list[str]:
        """`command`, on a host."""
        name = self.names[index]
        apart = ["unshare", "--mount", "--uts", "sh", "-c", ENTER]
        return ["ip", "netns", "exec", name, *apart, name, *command]

    def environment(self, index: int) -> dict[str, str]:
        """Variables for the commands of a host."""
        return {
            "TMPDIR": TEMPORARY,
            "VLLM_HOST_IP": self.addresses[index],
            "GLOO_SOCKET_IFNAME": "veth0",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }


def ip(*arguments: str) -> None:
    """Run `ip`."""
    found = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if found.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {found.stderr}")


def link(name: str, *where: str) -> None:
    """Create a pair of connected interfaces: ours, its place, the other, its place."""
    here, space, other, there, far = where[0], where[1], *where[2:]
    placed = [here, space] if here else []
    ip("link", "add", name, *placed, "type", "veth", "peer", other, there, far)


def up(address: str, interface: str, *where: str) -> None:
    """Give an interface an address, and start it."""
    ip(*where, "addr", "add", address, "dev", interface)
    ip(*where, "link", "set", interface, "up")


@contextmanager
def hosts() -> Iterator[Hosts]:
    """Two hosts; skips where the kernel refuses network namespaces."""
    made = Hosts(os.getpid())
    try:
        made.open()
    except OSError as error:
        made.close()
        pytest.skip(f"no network namespaces: {error}")
    try:
        yield made
    finally:
        made.close()


def started(
    command: Sequence[str], environment: dict[str, str], log: Path
) -> "subprocess.Popen[bytes]":
    """Start a command in a process group of its own; its output goes to `log`."""
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            cwd=Path(__file__).parents[2],
            env=os.environ | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
