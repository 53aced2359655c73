# SPDX-License-Identifier: Apache-2.0
"""Claim: what capture and steering cost a server on a GPU, against upstream's.

    python benchmarks/serving.py --fork FORK_PATH --upstream UPSTREAM_PATH \
        [--model 1b|8b] [--rounds 6] [--quick] [--out serving.json] \
        -- --gpu-memory-utilization 0.42

Two servers share the GPU: upstream's, and the fork's with both features enabled. The
paths become PYTHONPATH. Each case is a turn of the fork's between two of upstream's at
the same load, and each figure is its ratio to the mean of these two: a machine that
gets slower or faster meanwhile disturbs it little. Every other round goes the other
way. `upstream again` is a turn of upstream's own over its neighbours: what the machine
alone does. Two processes that do the same may differ for as long as they live, by a
tenth in the time to a first token, by a fifth where the processor sets the pace. So
there are turns of plain requests to the fork beside those of upstream's, and each
figure is compared with these as well: what the case costs this server. And with
`--servers 2` there are two of each, of which each round takes another pair. They start
at once, which says nothing of how long a start takes, and share the GPU by

    -- --gpu-memory-utilization 0.2 --kv-cache-memory-bytes 5368709120

The client is upstream's own `vllm bench serve`. Weights are random. Requests that are
steered take one of 16 configurations in turn. Captured rows go to `host_memory`, a
consumer that keeps them until their request has ended and does nothing else, so that
the figures are capture's own. `--quick`: two rounds, about four minutes.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for `benchmarks`

from benchmarks.harness import reports  # noqa: E402
from benchmarks.harness.child import Child  # noqa: E402
from benchmarks.harness.host_memory import NAME as HOST_MEMORY  # noqa: E402
from benchmarks.harness.host_memory import plug_in  # noqa: E402
from benchmarks.harness.llamas import MODELS, describe, model_folder  # noqa: E402
from benchmarks.harness.served import Server  # noqa: E402

WORK = ROOT / "build" / "benchmarks" / "serving"
HOOKS = ("pre_attn", "post_attn", "post_block")
MODULE_FORMAT = "clearbox-steering-v1"
"""Copied from `vllm.v1.steering.spec.files`, which may not be importable here."""
COLUMNS = {
    "mean_tpot_ms": "TPOT",
    "mean_ttft_ms": "TTFT",
    "total_token_throughput": "tokens/s",
}
"""Columns of the table, by the client's names."""
FIGURES = (*COLUMNS, "median_ttft_ms")
CONFIGS = 16
ALONE = "plain, one at a time"
NAMED = "steered, one at a time"
"""The case that shows how much naming a module delays the first token.

With concurrent requests their computation would delay it far more.
"""
NOISE = "upstream again"
"""Upstream's ratio to itself, in place of the fork's."""
MANY_TURNS = 3
"""The load that shows the noise has more turns of upstream than this."""
OWN = "plain"
"""The fork's turns of plain requests, a third side next to `upstream` and `fork`."""
Figures: TypeAlias = dict[str, float]
Round: TypeAlias = dict[str, dict[str, Figures]]
"""The client's figures, by case and side."""
Servers: TypeAlias = dict[str, list[Server]]
"""By side."""


class Beside(NamedTuple):
    """Consecutive turns of plain requests."""

    upstream: Figures
    fork: Figures | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """The requests that the client sends."""

    input_len: int
    output_len: int
    requests: int
    at_once: int


@dataclass(frozen=True, slots=True)
class Case:
    """A load, and the fields that its requests get in turn."""

    load: str
    bodies: Sequence[dict[str, Any]] = ()


def capture(positions: str, layers: Any) -> list[dict[str, Any]]:
    """Request fields that capture after each block."""
    spec = {"positions": positions, "hooks": {"post_block": layers}}
    return [{"capture": {HOST_MEMORY: spec}}]


def steer(modules: str) -> list[dict[str, Any]]:
    """Request fields that name the modules in turn."""
    return [{"steering_name": name} for name in names_of(modules)]


def names_of(modules: str) -> list[str]:
    """The names of the configurations with the same taps."""
    return [f"{modules}{number}" for number in range(CONFIGS)]


OPERATIONS: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "projected": ({"op": "project_out", "scale": 0.1}, "one", ("post_block",)),
    "projectedall": ({"op": "project_out", "scale": 0.1}, "all", ("post_block",)),
    "projectedpoints": ({"op": "project_out", "scale": 0.1}, "all", HOOKS),
    "clampedall": ({"op": "clamp", "min": -1.0, "max": 1.0}, "all", ("post_block",)),
    "matched": ({"norm_match": True, "scale": 0.01}, "one", ("post_block",)),
}
"""Entries of modules with operations: at one layer or at all, and at which points."""


def write_operations(width: int, layers: int) -> list[str]:
    """Write named configurations with operations; arguments of the server."""
    draw = random.Random(0)
    arguments = []
    for kind, (entry, where, hooks) in OPERATIONS.items():
        layer = "all" if where == "all" else str(layers // 2)
        for name in names_of(kind):
            vector = [draw.gauss(0.0, 1.0) for _ in range(width)]
            spec = {hook: {layer: {**entry, "vector": vector}} for hook in hooks}
            path = WORK / f"{name}.json"
            path.write_text(json.dumps({"vectors": spec}))
            arguments.append(f"{name}={path}")
    return arguments


def one_of_32(modules: str) -> list[dict[str, Any]]:
    """Request fields of which every 32nd names a module."""
    return [{"steering_name": names_of(modules)[0]}, *({} for _ in range(31))]


def cases(layers: int, chosen: Sequence[str] = ()) -> dict[str, Case]:
    """The cases by name; `plain` follows captures, as on a server with other users.

    Args:
        layers: the number of layers of the model.
        chosen: names of the cases; all if empty.

    """
    middle = layers // 2
    known = {
        "plain": Case("decode"),
        "steered, one layer": Case("decode", steer("one")),
        "steered, all layers and hooks": Case("decode", steer("all")),
        "one of 32 clamps at all layers": Case("decode", one_of_32("clampedall")),
        "one of 32 projects out at all layers": Case(
            "decode", one_of_32("projectedall")
        ),
        "all project out, one layer": Case("decode", steer("projected")[:1]),
        "all project out, all layers": Case("decode", steer("projectedall")[:1]),
        "all project out, all points": Case("decode", steer("projectedpoints")),
        "all norm-match, one layer": Case("decode", steer("matched")[:1]),
        ALONE: Case("alone"),
        NAMED: Case("alone", steer("one")),
        "captured, one layer": Case("decode", capture("all_generated", [middle])),
        "captured, all layers": Case("decode", capture("all_generated", "all")),
        "plain prompts": Case("prefill"),
        "prompts that project out, all layers": Case(
            "prefill", steer("projectedall")[:1]
        ),
        "captured prompts": Case("prefill", capture("all_prompt", "all")),
    }
    return {name: case for name, case in known.items() if name in (chosen or known)}


@dataclass(frozen=True, slots=True)
class Side:
    """One vLLM: the interpreter and its PYTHONPATH."""

    python: Path
    environment: Mapping[str, str]


class Client:
    """Upstream's client, in a separate process that runs one load after another."""

    def __init__(self, side: Side, model: Path) -> None:
        """Start it; `model` has the tokenizer."""
        self._model = model
        self._child = Child(
            [side.python, ROOT / "benchmarks" / "harness" / "client.py"],
            WORK / "client.log",
            {**os.environ, **side.environment},
        )
        self._child.answer()

    def close(self) -> None:
        """End the process."""
        self._child.close()

    def run(
        self, url: str, load: Load, bodies: Sequence[dict[str, Any]] = ()
    ) -> Figures:
        """Send one load to a server, whose requests take the bodies in turn."""
        result = WORK / "result.json"
        result.unlink(missing_ok=True)
        arguments = ["--base-url", url, "--model", "m", "--tokenizer", str(self._model)]
        arguments += ["--dataset-name", "random", "--ignore-eos", "--disable-tqdm"]
        arguments += ["--random-input-len", str(load.input_len)]
        arguments += ["--random-output-len", str(load.output_len)]
        arguments += ["--num-prompts", str(load.requests)]
        arguments += ["--max-concurrency", str(load.at_once), "--temperature", "0"]
        arguments += ["--save-result", "--result-filename", str(result)]
        self._child.ask({"arguments": arguments, "bodies": list(bodies)})
        found: dict[str, Any] = json.loads(result.read_text())
        assert found["completed"] == load.requests, found
        return {name: found[name] for name in FIGURES}


def write_modules(width: int, layers: int) -> list[str]:
    """Write named configurations for one tap and for all; arguments of the server."""
    import torch
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(0)
    places = {
        "one": [(layers // 2, "post_block")],
        "all": [(layer, hook) for layer in range(layers) for hook in HOOKS],
    }
    arguments = []
    for places_name, taps in places.items():
        for name in names_of(places_name):
            path = WORK / f"{name}.safetensors"
            tensors = {
                f"{hook}.{layer}": torch.randn(width, generator=draw) * 0.01
                for layer, hook in taps
            }
            save_file(tensors, path, metadata={"format": MODULE_FORMAT})
            arguments.append(f"{name}={path}")
    return arguments


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Start the servers, let them take turns, stop them."""
    WORK.mkdir(parents=True, exist_ok=True)
    size = MODELS[options.model]
    layers, width = size["num_hidden_layers"], size["hidden_size"]
    model = Path(model_folder(options.model))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "examples" / "demo_model" / "weights" / name, model)
    sides = {
        "upstream": Side(options.upstream_python, {"PYTHONPATH": options.upstream}),
        "fork": Side(
            options.fork_python,
            {"PYTHONPATH": f"{options.fork}:{plug_in(WORK / 'plugin')}"},
        ),
    }
    common = ["--load-format", "dummy", "--max-model-len", str(options.model_len)]
    common += ["--max-num-seqs", "256", "--no-enable-prefix-caching", *options.serve]
    features = ["--capture-consumers", HOST_MEMORY, "--enable-steering"]
    features += ["--max-steering-configs", str(CONFIGS), "--steering-modules"]
    features += write_modules(width, layers) + write_operations(width, layers)
    loads = {
        "decode": Load(64, options.output_len, options.requests, options.at_once),
        "prefill": Load(options.model_len - 8, 1, options.requests // 2, 8),
        "alone": Load(64, 4, options.requests, 1),
    }

    arguments = {"upstream": common, "fork": common + features}

    def serve(name: str, number: int) -> Server:
        side = sides[name]
        log = WORK / f"{name}{number or ''}.log"
        return Server(model, log, arguments[name], 0, side.python, side.environment)

    load_before = os.getloadavg()
    report = {**reports.begun(), "model": describe(options.model)}
    report |= {"gpu": reports.ask_gpu("name"), "serve": common}
    async with AsyncExitStack() as running:
        servers, how = await start(
            tuple(sides), serve, running, options.servers, options.together
        )
        report |= {
            **how,
            "machine": reports.machine(load_before),
            "loads": {name: repr(load) for name, load in loads.items()},
            "rounds": [],
        }
        client = Client(sides["upstream"], model)
        urls = {name: [one.url for one in of_side] for name, of_side in servers.items()}
        async for figures in take_turns(client, urls, loads, layers, options):
            report["rounds"].append(figures)
            reports.save(report, options.out)  # in case it is cut short
        client.close()
        report["gpu_gib"]["after the load"] = reports.gpu_memory_gib()
        report["capture"] = [await one.get("/v1/capture") for one in servers["fork"]]
    return report


async def start(
    sides: Sequence[str],
    serve: Callable[[str, int], Server],
    running: AsyncExitStack,
    number: int,
    together: bool,
) -> tuple[Servers, dict[str, Any]]:
    """Start servers of each side, one after the other or all together.

    Returns the servers and the figures of their start.

    Args:
        sides: in the order of their start.
        serve: starts one server.
        running: closes the servers at the end.
        number: servers per side.
        together: whether they start at once, which several per side always do.

    """
    memory = {"before": reports.gpu_memory_gib()}
    started = {}
    servers: Servers = {}
    for name in sides:
        begin = time.monotonic()
        servers[name] = [
            await running.enter_async_context(serve(name, index))
            for index in range(number)
        ]
        if number == 1 and not together:
            [only] = servers[name]
            await only.ready()
            started[name] = start_of(only, begin)
            memory[f"{name} is ready"] = reports.gpu_memory_gib()
    for one in chain(*servers.values()):
        await one.ready()
    memory["all are ready"] = reports.gpu_memory_gib()
    return servers, {"start": started, "gpu_gib": memory}


async def take_turns(
    client: Client,
    urls: Mapping[str, Sequence[str]],
    loads: Mapping[str, Load],
    layers: int,
    options: argparse.Namespace,
) -> AsyncIterator[Round]:
    """Yield each round's figures, after running every case once on every server."""
    known = cases(layers, options.case)
    asked = dict.fromkeys(case.load for case in known.values())
    turns = [("upstream", Case(load)) for load in asked]
    turns += [("fork", case) for case in known.values()]
    for side, case in turns:
        for url in urls[side]:
            await asyncio.to_thread(client.run, url, loads[case.load], case.bodies)
    for number in range(options.rounds):
        pair, forth = plan_round(number, options.servers)
        figures: Round = {}
        for load_name, load in loads.items():
            of_load = {n: case for n, case in known.items() if case.load == load_name}

            def turn(
                side: str,
                bodies: Sequence[dict[str, Any]] = (),
                load: Load = load,
                pair: Mapping[str, int] = pair,
            ) -> Figures:
                return client.run(urls[side][pair[side]], load, bodies)

            if of_load:
                figures |= await asyncio.to_thread(one_load, of_load, turn, forth)
        print(f"  round {number + 1} of {options.rounds}", flush=True)
        yield {name: figures[name] for name in (NOISE, *known) if name in figures}


def plan_round(number: int, servers: int) -> tuple[dict[str, int], bool]:
    """The server of each side in a round, and whether the order is the usual one.

    After `servers` squared rounds all pairs have met, half of them (or one more) in the
    usual order.
    """
    lap, place = divmod(number, servers)
    return {"upstream": place, "fork": (place + lap) % servers}, lap % 2 == 0


def one_load(
    known: Mapping[str, Case], turn: Callable[..., Figures], forth: bool
) -> Round:
    """A round of the cases with the same load, in the usual or the reverse order."""
    asked = [name for name, case in known.items() if case.bodies]
    plain = next((name for name in known if name not in asked), None)

    def beside() -> Beside:
        if plain is None:
            return Beside(turn("upstream"))
        sides = ("upstream", "fork") if forth else ("fork", "upstream")
        return Beside(**{side: turn(side) for side in sides})

    between = [beside()]
    fork = {}
    for name in asked if forth else asked[::-1]:
        fork[name] = turn("fork", known[name].bodies)
        between.append(beside())
    return compare(fork, between, plain)


def compare(
    fork: Mapping[str, Figures], beside: Sequence[Beside], plain: str | None = None
) -> Round:
    """Combine the fork's turns in order with the means of their neighbours.

    Args:
        fork: figures by case.
        beside: turns of plain requests, before each of the fork's and after the last.
        plain: the case of the fork that has the same plain requests, if any.

    """
    found: Round = {}
    for (name, figures), before, behind in zip(
        fork.items(), beside[:-1], beside[1:], strict=True
    ):
        found[name] = {
            "upstream": _mean(before.upstream, behind.upstream),
            "fork": figures,
        }
        if before.fork is not None and behind.fork is not None:
            found[name][OWN] = _mean(before.fork, behind.fork)
    own = [one.fork for one in beside if one.fork is not None]
    if plain is not None:
        found[plain] = {
            "upstream": _mean(*(one.upstream for one in beside)),
            "fork": _mean(*own),
        }
    if len(beside) > MANY_TURNS:
        middle = len(beside) // 2
        around = beside[middle - 1].upstream, beside[middle + 1].upstream
        found[NOISE] = {"upstream": _mean(*around), "fork": beside[middle].upstream}
    return found


def _mean(*turns: Figures) -> Figures:
    return {name: statistics.fmean(one[name] for one in turns) for name in turns[0]}


def start_of(server: Server, begin: float) -> dict[str, float]:
    """Seconds until a server was ready, and figures of its start from the log."""
    seconds = time.monotonic() - begin
    log = server.log.read_text(errors="replace")
    return {"seconds": seconds, **reports.engine_facts(log)}


def ratio(figures: Round, name: str, figure: str, side: str = "upstream") -> float:
    """The ratio of a figure of the fork to that of another side."""
    return figures[name]["fork"][figure] / figures[name][side][figure]


def print_table(report: dict[str, Any], layers: int) -> None:
    """Print figures of the starts, then medians over the rounds with ranges."""
    reports.print_starts(report["start"])
    for when, gib in report["gpu_gib"].items():
        print(f"GPU memory, {when}: {'unknown' if gib is None else f'{gib:.2f} GiB'}")
    for side, over in {"upstream": "upstream", OWN: "its own plain requests"}.items():
        columns = "".join(f"{column:>24}" for column in COLUMNS.values())
        print(f"{f'over {over}':<32}{columns}")
        print_ratios(report["rounds"], side, cases(layers))
    for side, over in {"upstream": "upstream's", OWN: "that of its plain ones"}.items():
        rounds = [r[NAMED] for r in report["rounds"] if side in r.get(NAMED, {})]
        later = [first_token_later(figures, side) for figures in rounds]
        if later:
            print(
                "First token where a module is named, one request at a time, ms later "
                f"than {over}: {statistics.median(later):.2f} ({min(later):.2f} to "
                f"{max(later):.2f})"
            )


def print_ratios(rounds: Sequence[Round], side: str, known: Mapping[str, Case]) -> None:
    """Print the ratios of cases that were compared with this side."""
    for name in (name for name, sides in rounds[0].items() if side in sides):
        cells = []
        for figure in COLUMNS:
            of_prompts = name in known and known[name].load == "prefill"
            if of_prompts and figure == "mean_tpot_ms":
                cells.append("-")  # one token has no time between tokens
                continue
            found = [ratio(one, name, figure, side) for one in rounds]
            median = statistics.median(found)
            cells.append(f"{median:.3f} ({min(found):.3f} to {max(found):.3f})")
        print(f"{name:<32}" + "".join(f"{cell:>24}" for cell in cells))


def first_token_later(figures: Mapping[str, Figures], side: str) -> float:
    """Milliseconds by which the median time to first token exceeds another side's."""
    return figures["fork"]["median_ttft_ms"] - figures[side]["median_ttft_ms"]


def main() -> None:
    """Parse the command line, measure, write, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fork", required=True, help="PYTHONPATH of the fork")
    parser.add_argument("--upstream", required=True, help="PYTHONPATH of upstream")
    parser.add_argument("--fork-python", type=Path, default=Path(sys.executable))
    parser.add_argument("--upstream-python", type=Path, default=Path(sys.executable))
    parser.add_argument("--model", choices=MODELS, default="1b")
    parser.add_argument("--model-len", type=int, default=4104)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--rounds", type=int, help="default 6; 2 with --quick")
    parser.add_argument("--servers", type=int, default=1, help="of each side")
    parser.add_argument("--quick", action="store_true", help="about 4 minutes")
    parser.add_argument(
        "--together", action="store_true", help="start the servers at once"
    )
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        choices=list(cases(1)),
        help="only this one; may be given several times",
    )
    parser.add_argument("--out", type=Path, default=WORK / "serving.json")
    parser.add_argument("serve", nargs="*", help="more arguments for both servers")
    options = parser.parse_args()
    if options.rounds is None:
        options.rounds = 2 if options.quick else 6
    report = asyncio.run(run(options))
    print_table(report, MODELS[options.model]["num_hidden_layers"])
    reports.write(report, options.out)


if __name__ == "__main__":
    main()
