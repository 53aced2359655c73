# SPDX-License-Identifier: Apache-2.0
"""Ends the ranks of an engine when another of its nodes has ended.

Upstream's ranks wait for those of a killed node in a collective operation or for a
step's output, without an end or for minutes. A connection between the nodes that
carries nothing is closed by the kernel when its process ends; keep-alive packets notice
a node that is cut off.
"""

import os
import socket
from collections.abc import Callable
from threading import Thread
from typing import Any

from vllm.logger import init_logger
from vllm.utils.network_utils import get_ip

logger = init_logger(__name__)

KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds until the first packet, between two, and how many may be lost."""


def watch_nodes(
    rank: int, node_rank: int, node: str, gathered: Callable[[Any], list[Any]]
) -> None:
    """Connect each rank on other nodes with rank 0; called by every rank.

    If either end of a connection ends, the other logs which node that was and ends its
    process, so that upstream stops the engine.

    Args:
        rank: of this process.
        node_rank: of its node; 0 on that of rank 0.
        node: the node's name.
        gathered: returns the value of every rank.

    """
    listener = None
    if rank == 0:
        host = get_ip()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
    places = gathered((node_rank, node, listener and listener.getsockname()[:2]))
    _, first, address = places[0]
    if node_rank > 0:
        peer = socket.create_connection(address, timeout=60)
        peer.settimeout(None)
        peer.sendall(rank.to_bytes(4, "little"))
        _watch(peer, first, 0)
    elif listener is not None:
        listener.settimeout(60)
        for _ in range(sum(number > 0 for number, *_ in places)):
            peer, _ = listener.accept()
            peer.settimeout(None)
            other = int.from_bytes(peer.recv(4, socket.MSG_WAITALL), "little")
            _watch(peer, places[other][1], other)
        listener.close()


def _watch(peer: socket.socket, node: str, rank: int) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    Thread(
        target=_wait_for_end, args=(peer, node, rank), name="node-watch", daemon=True
    ).start()


def _wait_for_end(peer: socket.socket, node: str, rank: int) -> None:
    address = peer.getpeername()[0]
    try:
        peer.recv(1)
        why = "its process has ended"
    except OSError as error:
        why = str(error)
    logger.error(
        "Node %s (%s) is gone, and rank %d with it: %s. The engine stops; start it on "
        "all nodes again. Captures that were complete are on disk.",
        node,
        address,
        rank,
        why,
    )
    os._exit(1)  # The engine's thread may wait for that node.
