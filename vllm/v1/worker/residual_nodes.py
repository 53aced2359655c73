# SPDX-License-Identifier: Apache-2.0
"""Whether the nodes of one engine agree, checked at its start, and whether they last.

Each node has a command line, an installation and a disk of its own. Without the check,
ranks of nodes that differ compute with other weights, write into folders that nobody
merges, or wait for each other without an end. It takes the time of a digest of the
weights at the start, and nothing later.

Upstream's ranks wait for those of a killed node in a collective operation or for a
step's output, without an end or for minutes. A connection between the nodes that
carries nothing is closed by the kernel when its process ends; keep-alive packets notice
a node that is cut off.
"""

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

import vllm
from vllm.distributed.parallel_state import (
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_world_group,
)
from vllm.logger import init_logger
from vllm.utils.network_utils import get_ip
from vllm.v1.residual.model_identity import digest_of_weights

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds until the first packet, between two, and how many may be lost."""

REMEDY = {
    "version": "install the same wheel on every node",
    "weights": "copy one checkpoint to every node",
}
OTHERWISE = "start every node with the same options"

Facts = dict[str, str]


def check_nodes(vllm_config: "VllmConfig") -> None:
    """Refuse nodes that differ from that of rank 0; called by every rank.

    Does nothing if all ranks of the engine are on one node.

    Raises:
        ValueError: with the node, both values and the remedy; on every rank.

    """
    parallel = vllm_config.parallel_config
    if parallel.nnodes == 1 and not parallel.use_ray:
        return
    others = _gathered((_node(), facts_of(vllm_config)))
    first_node, first = others[0]
    for node, facts in others[1:]:
        if problem := difference(first, facts):
            raise ValueError(f"node {node} differs from node {first_node}: {problem}")
    for name, root in _roots(vllm_config).items():
        _check_shared(name, root)
    if parallel.nnodes > 1:  # Ray watches its actors itself.
        rank = get_world_group().rank_in_group
        watch_nodes(rank, parallel.node_rank_within_dp, _node(), _gathered)


def facts_of(vllm_config: "VllmConfig") -> Facts:
    """What must be equal on every node, as texts that a message can show."""
    capture, readouts = vllm_config.capture_config, vllm_config.readout_config
    steering = vllm_config.steering_config
    consumers = {one.instance_name: (one.name, one.params) for one in capture.consumers}
    step = [one.name for one in capture.step_consumers]
    return {
        "version": vllm.__version__,
        "--capture-consumers": repr(consumers),
        "consumers in the step": repr(step),
        "--hook-points": repr(capture.optional_points),
        "steering options": repr(steering),
        "readout modules": repr((readouts.modules, readouts.saes)),
        "weights": weights_of(
            vllm_config.model_config.model, vllm_config.model_config.revision
        ),
    }


def difference(first: Facts, other: Facts) -> str | None:
    """The first fact in which a node differs, with the remedy; None if it does not."""
    for name, value in first.items():
        if other[name] != value:
            remedy = REMEDY.get(name, OTHERWISE)
            return f"{name} is {other[name]} there, and {value} here; {remedy}"
    return None


def weights_of(model: str, revision: str | None = None) -> str:
    """The digest of a checkpoint and its first file; its name if it has no files."""
    digest = digest_of_weights(model, revision)
    if not digest:
        return model
    first = min(Path(model).glob("*.safetensors"), default=Path())
    return f"SHA-256 {digest}, {first.name}"


def _roots(vllm_config: "VllmConfig") -> Mapping[str, str]:
    """The folders of consumers in which several pipeline stages write."""
    if get_pp_group().world_size == 1:
        return {}
    consumers = vllm_config.capture_config.consumers
    named = {one.instance_name: one.params.get("root") for one in consumers}
    return {name: str(root) for name, root in named.items() if root}


def _check_shared(name: str, root: str) -> None:
    """Refuse a root that is another folder on the node of another stage."""
    world = get_world_group()
    path = Path(root, f".shared-{_gathered(uuid4().hex)[0]}")
    if world.rank_in_group == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    torch.distributed.barrier(world.cpu_group)
    writes = get_tensor_model_parallel_rank() == 0
    seen = _gathered((_node(), not writes or path.exists()))
    if world.rank_in_group == 0:
        path.unlink()
    for node, sees in seen:
        if not sees:
            raise ValueError(
                f"capture consumer {name!r}: root={root!r} of node {seen[0][0]} is "
                f"another folder on node {node}, whose stage would write there; mount "
                "one folder on both, or use the consumer 'inline', whose rows return "
                "through the front end"
            )


def _node() -> str:
    return socket.gethostname()


def _gathered(value: Any) -> list[Any]:
    """The value of every rank."""
    world = get_world_group()
    found: list[Any] = [None] * world.world_size
    torch.distributed.all_gather_object(found, value, group=world.cpu_group)
    return found


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
