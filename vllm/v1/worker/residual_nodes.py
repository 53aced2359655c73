# SPDX-License-Identifier: Apache-2.0
"""Whether the nodes of one engine agree, checked at its start.

Each node has a command line, an installation and a disk of its own. Without the check,
ranks of nodes that differ compute with other weights, write into folders that nobody
merges, or wait for each other without an end. It takes the time of a digest of the
weights at the start, and nothing later.
"""

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

import vllm
from vllm.distributed.parallel_state import (
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_world_group,
)
from vllm.v1.residual.model_identity import digest_of_weights
from vllm.v1.worker.node_watch import watch_nodes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

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
