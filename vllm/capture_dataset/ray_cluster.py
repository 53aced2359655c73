# SPDX-License-Identifier: Apache-2.0
"""Runs shards on engines in a Ray cluster, each of which writes its shards' files.

Ray Data schedules, retries and bounds the work. Without it a user of many nodes starts
a server on each, and all rows pass through one process. By how much that is slower was
not measured: there was no cluster of several machines.
"""

import os
import pickle
import socket
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import uuid4

from vllm import __version__
from vllm.capture_dataset.collect import run_shard
from vllm.capture_dataset.manifest import ShardFile
from vllm.capture_dataset.prompts import Prompt, Tokens
from vllm.capture_dataset.runners import CaptureRunError, Runner
from vllm.capture_dataset.shards import ShardFolder
from vllm.capture_dataset.spec import ModelFacts, RowsSpec
from vllm.capture_dataset.table import Captured
from vllm.platforms import current_platform
from vllm.ray.ray_env import get_env_vars_to_copy
from vllm.v1.capture.errors import fail
from vllm.v1.executor.ray_utils import WORKER_SPECIFIC_ENV_VARS

if TYPE_CHECKING:
    from vllm.capture_dataset.plan import Plan

Opened: TypeAlias = Callable[[], Runner]
"""Starts an engine."""
RETRIES = 3
"""How often a shard is tried again after its actor's process has died."""
CONNECT_SECONDS = 10.0
AT_ONCE = 2
"""Shards in an actor: one is computed while another is written."""


class RayRunner:
    """A runner on a Ray cluster.

    One engine starts first: it gives the plan the model's facts, and tries prompts.
    """

    def __init__(
        self,
        address: str,
        engines: int | None,
        opened: Opened,
        ranks: int,
        folder: Path | None,
    ) -> None:
        """Connect, compare the nodes, and start the first engine.

        Args:
            address: the cluster's address; `auto` for that of this machine.
            engines: number of engines; None for as many as there are GPUs for, or one
                on each node.
            opened: starts an engine in the process that calls it.
            ranks: number of GPUs of an engine.
            folder: that of the data set, which every node must share; None if none is
                written.

        Raises:
            CaptureValidationError: Ray is not installed, there is no cluster, or a
                node cannot run the engines.

        """
        self._opened = opened
        self._ray = _connected(address)
        self._needs = {"num_cpus": 1, "num_gpus": 0}
        if not current_platform.is_cpu():
            self._needs["num_gpus"] = ranks
        nodes = self._nodes()
        self._compare(nodes, folder)
        self._engines = self._count(nodes, engines)
        first = self._ray.remote(**self._needs)(_First)
        self._first: Any = first.remote(opened)
        self.model: ModelFacts
        self.model, self.tokenizer, self._modules = self._ask("facts")

    def _nodes(self) -> list[dict[str, Any]]:
        """The nodes that have what an engine needs."""
        wanted = {"CPU": self._needs["num_cpus"], "GPU": self._needs["num_gpus"]}
        return [
            node
            for node in self._ray.nodes()
            if node["Alive"]
            and all(node["Resources"].get(kind, 0) >= n for kind, n in wanted.items())
        ]

    def _count(self, nodes: list[dict[str, Any]], wanted: int | None) -> int:
        """The number of engines.

        Raises:
            CaptureValidationError: there is no room for so many.

        """
        gpus = self._needs["num_gpus"]
        kind, each = ("GPU", gpus) if gpus else ("CPU", self._needs["num_cpus"])
        room = sum(int(node["Resources"][kind] // each) for node in nodes)
        wanted = (room if gpus else len(nodes)) if wanted is None else wanted
        if not 0 < wanted <= room:
            raise fail(
                f"ray_engines: the cluster has room for {room} engines of {each} "
                f"{kind} each, not for {max(wanted, 1)}; add nodes, or use fewer",
                "ray_engines",
                wanted,
            )
        return wanted

    def _compare(self, nodes: list[dict[str, Any]], folder: Path | None) -> None:
        """Refuse nodes without this version, or with another folder of this path.

        Raises:
            CaptureValidationError: with the node, what it has, and the remedy.

        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # Sent by value, because a node may not have this module.
        def seen(path: Path | None) -> tuple[str, bool]:
            from importlib.metadata import PackageNotFoundError, version

            shares = path is None or path.exists()
            try:
                return f"vllm {version('vllm')}", shares
            except PackageNotFoundError:
                return "no vllm", shares

        mark = None if folder is None else folder.absolute() / f".{uuid4().hex}"
        if mark is not None:
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
        try:
            task = self._ray.remote(num_cpus=0, max_retries=0)(seen)
            asked = [
                task.options(
                    scheduling_strategy=NodeAffinitySchedulingStrategy(
                        node["NodeID"], soft=False
                    )
                ).remote(mark)
                for node in nodes
            ]
            answers = self._ray.get(asked)
        finally:
            if mark is not None:
                mark.unlink()
        for node, (version, shares) in zip(nodes, answers, strict=True):
            where = f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            if version != f"vllm {__version__}":
                raise fail(
                    f"ray: {where} has {version}, and this machine vllm {__version__}; "
                    "install the same wheel on every node",
                    "ray",
                    version,
                )
            if not shares:
                raise fail(
                    f"out: {str(folder)!r} of this machine is another folder on "
                    f"{where}, whose engine would write there; mount one folder on "
                    "all nodes, or start servers and use --server",
                    "out",
                    str(folder),
                )

    def _ask(self, method: str, *args: Any) -> Any:
        """Call a method of the first engine.

        Raises:
            CaptureRunError: the engine failed.

        """
        call = getattr(self._first, method)
        with _understood():
            return self._ray.get(call.remote(*args))

    def run(
        self, prompts: Sequence[Prompt], rows: RowsSpec, tokens: Tokens
    ) -> Iterator[Captured]:
        """Run prompts on the first engine."""
        yield from self._ask("run", prompts, rows, tokens)

    def readout_modules(self) -> dict[str, Any]:
        """The modules of the first engine."""
        return self._modules

    def written(
        self, plan: "Plan", facts: dict[str, Any], first_sample: int, number: int
    ) -> Generator[ShardFile]:
        """Compute and write the shards from a sample on; returns them in order.

        Each shard is one item of a Ray data set. An actor that dies is replaced, and
        its shards are written again, under the same names.

        Raises:
            CaptureRunError: a prompt or an engine failed.

        """
        from ray.data import ActorPoolStrategy, DataContext, from_items
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._ray.kill(self._first)
        context = DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.preserve_order = True
        context.target_max_block_size = 1  # So each shard is a block, and a task.
        here = NodeAffinitySchedulingStrategy(
            self._ray.get_runtime_context().get_node_id(), soft=False
        )

        # Only this machine must be able to read the source.
        def shards(_: Any) -> Iterator[dict[str, Any]]:
            for index, prompts in enumerate(plan.shards(first_sample), number):
                yield {"number": [index], "prompts": [pickle.dumps(prompts)]}

        done = (
            from_items([0])
            .map_batches(shards, num_cpus=0, scheduling_strategy=here)
            .map_batches(
                _Writer,
                fn_constructor_args=(self._opened, plan, facts, self._modules),
                batch_size=1,
                compute=ActorPoolStrategy(
                    size=self._engines,
                    max_tasks_in_flight_per_actor=AT_ONCE,
                    enable_true_multi_threading=True,
                ),
                max_concurrency=AT_ONCE,
                max_task_retries=RETRIES,
                **self._needs,
            )
        )
        with _understood():
            for row in done.iter_rows():
                yield ShardFile.of(pickle.loads(row["shard"]))

    def close(self) -> None:
        """Leave the cluster; its actors of this run end."""
        self._ray.shutdown()


def _connected(address: str) -> Any:
    """Ray, connected to a cluster.

    Raises:
        CaptureValidationError: Ray is not installed, or does not answer.

    """
    try:
        import ray
    except ImportError:
        raise fail(
            "ray: Ray is not installed here; install it with pip install 'vllm[ray]', "
            "on every node",
            "ray",
            address,
        ) from None
    names = get_env_vars_to_copy(WORKER_SPECIFIC_ENV_VARS, destination="Ray actors")
    variables = {name: os.environ[name] for name in names if name in os.environ}
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdecimal():  # Ray itself tries for minutes.
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        ray.init(address, runtime_env={"env_vars": variables}, log_to_driver=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise fail(
            f"ray: no cluster answers at {address!r} ({error}); start one with ray "
            "start --head, or give its address, such as --ray 10.0.0.1:6379",
            "ray",
            address,
        ) from None
    return ray


@contextmanager
def _understood() -> Iterator[None]:
    """Raise Ray's errors as those of prompts.

    Raises:
        CaptureRunError: with what failed in the actor.

    """
    from ray.exceptions import RayError

    try:
        yield
    except RayError as error:
        raise CaptureRunError(f"ray: {error}") from error


class _First:
    """The first engine, in an actor."""

    def __init__(self, opened: Opened) -> None:
        self._runner = opened()

    def facts(self) -> tuple[ModelFacts, Any, dict[str, Any]]:
        """The model, its tokenizer and the readout modules."""
        runner = self._runner
        return runner.model, runner.tokenizer, runner.readout_modules()

    def run(
        self, prompts: Sequence[Prompt], rows: RowsSpec, tokens: Tokens
    ) -> list[Captured]:
        """Run prompts."""
        return list(self._runner.run(prompts, rows, tokens))


class _Writer:
    """An engine that computes and writes shards, in an actor with two threads."""

    def __init__(
        self,
        opened: Opened,
        plan: "Plan",
        facts: dict[str, Any],
        modules: dict[str, Any],
    ) -> None:
        self._runner = opened()
        self._plan = plan
        self._computes = Lock()
        # With a part of its own for unfinished files.
        self._folder = ShardFolder(plan.output.folder, facts, uuid4().hex)
        have = replace(self._runner.model, tokenizer=plan.model.tokenizer)
        if (have, self._runner.readout_modules()) != (plan.model, modules):
            raise CaptureRunError(
                f"node {socket.gethostname()} has another model or other readout "
                f"modules than the first engine ({have} and {plan.model}); copy one "
                "checkpoint to every node"
            )

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Compute a shard and write it."""
        prompts = pickle.loads(batch["prompts"][0])
        with self._computes:
            number = int(batch["number"][0])
            shard = run_shard(self._plan, self._runner, number, prompts)
        done = self._folder.write(shard)
        return {"shard": [pickle.dumps(asdict(done))]}
