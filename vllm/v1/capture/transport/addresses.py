# SPDX-License-Identifier: Apache-2.0
"""Addresses of front ends: an IPC path, and TCP ports for workers on other hosts.

An address is one text, because it travels in the plan of each request:

    ipc://PATH [tcp://HOST:PORT [INSTANCE=tcp://HOST:PORT ...]]

The ports named by an instance take the rows of one driver-side consumer.
"""

import os
import zlib
from typing import TYPE_CHECKING, Any

import zmq

from vllm.utils.network_utils import get_ip, get_open_zmq_ipc_path

if TYPE_CHECKING:
    from vllm.config import ParallelConfig


def host_for(config: "ParallelConfig") -> str | None:
    """The IP address of this host, if workers may run on others; otherwise None."""
    local_engines = config.data_parallel_size_local
    spread = config.data_parallel_size > local_engines > 0
    if config.nnodes > 1 or spread or config.use_ray:
        return str(get_ip())
    return None


def new_address(
    socket: "zmq.Socket[Any]", address: str | None, host: str | None
) -> str:
    """Bind a socket; returns its address.

    Args:
        socket: a socket that is not bound yet.
        address: the IPC address; None chooses one.
        host: the IP address of a TCP port in addition; None binds none.

    """
    address = address or get_open_zmq_ipc_path()
    socket.bind(address)
    if host is None:
        return address
    socket.setsockopt(zmq.IPV6, ":" in host)
    socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
    return f"{address} {socket.getsockopt_string(zmq.LAST_ENDPOINT)}"


def local(address: str) -> str:
    """The part of an address that is for processes of the same host."""
    return address.partition(" ")[0]


def reachable(address: str) -> str:
    """The endpoint to which this process connects.

    The IPC path contains a UUID: if it exists here, the front end is on this host.
    """
    path, *ports = address.split(" ")
    if not ports or os.path.exists(path.removeprefix("ipc://")):
        return path
    return ports[0]


def with_rows(address: str, instance: str, rows: str) -> str:
    """Add the address of a driver-side instance's rows to its front end's."""
    _, _, port = rows.partition(" ")
    return f"{address} {_name(instance)}={port}" if port else address


def rows_address(address: str, instance: str) -> str:
    """The address for a driver-side instance's rows, from its front end's address."""
    path, *ports = address.split(" ")
    name = _name(instance)
    rows = [port.removeprefix(f"{name}=") for port in ports if port.startswith(name)]
    return " ".join([f"{path}-{name}", *rows])


def _name(instance: str) -> str:
    return f"{zlib.crc32(instance.encode()):08x}"
