# SPDX-License-Identifier: Apache-2.0
"""How fast a lens of all layers is, compared with a client's own from its rows.

    python benchmarks/readouts_client.py [--model FOLDER] [--rounds 7] [--out lens.json]

One CPU server answers the same requests over HTTP twice: with a lens of all layers, and
with the rows of all layers in the JSON response (`inline`), from which the client
computes the lens with the model's own norm and head, in float32 with torch and as many
threads. A turn ends when the client has token ids and log-probabilities of the five
likeliest tokens of every layer. There are two clients: one that decodes a layer after
the other, as `examples/capture/logit_lens.py`, and one that decodes all layers with one
product.

- `live`: the tokens are streamed, and each one's lens is needed when it arrives;
- `generated`: the same tokens, at the end;
- `prompt`: the 128 tokens of a prompt.

The turns of a round follow each other; a ratio is of two turns of one round. The
default model has random weights and the shape of SmolLM2-135M: 30 layers of width 576,
49,152 tokens. It is served in bfloat16, as users do, and in float32, where results are
compared. CPU time is that of client and server. While other jobs use the cores, threads
wait for each other: then give both sides one (`--threads 1`) and look at CPU time.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # At the end, as the checkout has a folder `vllm` too.
sys.path.append(str(ROOT / "client"))

import numpy as np  # noqa: E402
import psutil  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from clearbox_client.payloads import entry_values  # noqa: E402

from benchmarks.harness import reports  # noqa: E402
from benchmarks.harness.models import random_llama, random_prompts  # noqa: E402
from tests.support.server import OWN_WORKER, Server  # noqa: E402

WORK = ROOT / "build" / "benchmarks"
TOP = 5
TOLERANCE = 1e-3
"""Largest difference of log-probabilities in float32."""
LOADS = {
    # Prompt tokens, generated tokens, positions, whether to stream.
    "live": (16, 24, "all_generated", True),
    "generated": (16, 24, "all_generated", False),
    "prompt": (128, 1, "all_prompt", False),
}

Lens = dict[int, tuple[np.ndarray, np.ndarray]]
"""By position: token ids and log-probabilities `[layers, TOP]`."""


class Client:
    """A client that has the model's norm and head."""

    def __init__(self, model: Path) -> None:
        whole = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32
        )
        self._norm, self._head = whole.model.norm, whole.lm_head

    @torch.no_grad()
    def by_layer(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The lens of rows `[layers, positions, width]`, a layer after the other."""
        found = [self._top(torch.from_numpy(one)) for one in rows]
        ids, logs = zip(*found)
        return np.stack(ids), np.stack(logs)

    @torch.no_grad()
    def at_once(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same with one product over all layers."""
        layers, positions, width = rows.shape
        ids, logs = self._top(torch.from_numpy(rows).view(-1, width))
        shape = layers, positions, TOP
        return ids.reshape(shape), logs.reshape(shape)

    def _top(self, rows: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        best = self._head(self._norm(rows)).log_softmax(dim=-1).topk(TOP, dim=-1)
        return best.indices.numpy(), best.values.numpy()


Decode = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def from_rows(payload: Iterable[Mapping[str, Any]], decode: Decode, lens: Lens) -> None:
    """Decode the rows of a payload at positions that are not in `lens` yet."""
    taps = sorted(payload, key=lambda one: int(one["layer"]))
    places = [
        n for n, p in enumerate(taps[0]["positions"] if taps else ()) if p not in lens
    ]
    if not places:
        return
    rows = np.stack([entry_values(one)[places] for one in taps])
    ids, logs = decode(rows.astype(np.float32, copy=False))
    for number, place in enumerate(places):
        lens[taps[0]["positions"][place]] = ids[:, number], logs[:, number]


def from_readout(found: Mapping[str, Any], lens: Lens) -> None:
    """Take the results of a readout."""
    for place, ids, logs in zip(
        found["positions"], found["token_ids"], found["logprobs"]
    ):
        lens[place] = np.array(ids), np.array(logs)


@dataclass(slots=True)
class Turns:
    """The turns of one load."""

    wall: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)
    last: dict[str, Lens] = field(default_factory=dict)

    def ratios(self, clock: str, way: str) -> list[float]:
        """A client's time over the readout's, by round; the first warms up."""
        times = self.wall if clock == "wall" else self.cpu
        return [a / b for a, b in zip(times[way][1:], times["readout"][1:])]


def ask(server: Server, load: str, way: str, prompt: list[int], client: Client) -> Lens:
    """One request and all its work; returns the lens, empty for `plain`."""
    _, tokens, positions, streams = LOADS[load]
    body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": tokens}
    body |= {"temperature": 0, "ignore_eos": True}
    if way == "readout":
        spec = {"kind": "lens", "top_k": TOP, "positions": positions}
        body["readouts"] = {"lens": spec}
    elif way != "plain":
        rows = {"hooks": {"post_block": "all"}, "positions": positions}
        body |= {"capture": {"inline": rows}, "capture_wait": True}
        body["capture_stream"] = streams
    lens: Lens = {}
    if streams:
        chunks = server.stream("/v1/completions", body)
    else:
        reply = server.post("/v1/completions", body)
        assert reply.status == 200, reply
        chunks = iter([reply.body])
    for chunk in chunks:
        if found := (chunk.get("readouts") or {}).get("lens"):
            from_readout(found, lens)
        if results := chunk.get("capture_results"):
            decode = client.at_once if way == "at once" else client.by_layer
            from_rows(results["inline"]["payload"] or (), decode, lens)
    return lens


def cpu_seconds(server: Server) -> float:
    """CPU time of this process, and of the server with its children."""
    top = psutil.Process(server.pid)
    used = [psutil.Process(), top, *top.children(recursive=True)]
    return sum(sum(one.cpu_times()[:2]) for one in used)


def take_turns(
    server: Server, load: str, client: Client, rounds: int, requests: int
) -> Turns:
    """Rounds of all ways; the order alternates, and the first round warms up."""
    turns = Turns()
    length = LOADS[load][0]
    prompts = random_prompts(requests, length, length)
    ways = ["plain", "readout", "by layer", "at once"]
    for number in range(rounds + 1):
        for way in ways if number % 2 else reversed(ways):
            began, used = time.perf_counter(), cpu_seconds(server)
            for prompt in prompts:
                lens = ask(server, load, way, prompt, client)
            turns.wall.setdefault(way, []).append(time.perf_counter() - began)
            turns.cpu.setdefault(way, []).append(cpu_seconds(server) - used)
            turns.last[way] = lens
        latest = {way: round(one[-1], 3) for way, one in turns.wall.items()}
        print(f"  {load:10} {latest}", flush=True)
    return turns


def largest_difference(turns: Turns) -> float:
    """Of log-probabilities between the readout and both clients, over all positions.

    Raises:
        RuntimeError: a position is missing.

    """
    own, worst = turns.last["readout"], 0.0
    for way in ("by layer", "at once"):
        if turns.last[way].keys() != own.keys():
            raise RuntimeError(f"{sorted(own)} and {sorted(turns.last[way])}")
        for position, (_, logs) in turns.last[way].items():
            worst = max(worst, float(np.abs(logs - own[position][1]).max()))
    return worst


def measure(dtype: str, options: argparse.Namespace, report: dict[str, Any]) -> None:
    """All loads on a server of one dtype."""
    client = Client(options.model)
    arguments = ["--enable-readouts", "--capture-consumers", "inline"]
    arguments += ["--dtype", dtype, "--max-model-len", "512", "--enforce-eager"]
    arguments += ["--gpu-memory-utilization", "0.2"]  # Of the machine's memory.
    arguments += ["--served-model-name", "m", "--no-enable-prefix-caching"]
    # By default a worker leaves one core to the API server, half of a small machine's.
    threads = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    threads["OMP_NUM_THREADS"] = str(options.threads)
    server = Server(options.model, *arguments, **OWN_WORKER, **threads)
    try:
        for load in options.loads:
            turns = take_turns(server, load, client, options.rounds, options.requests)
            gap = largest_difference(turns)
            seconds = {w: statistics.median(t[1:]) for w, t in turns.wall.items()}
            if dtype == "float32" and gap > TOLERANCE:
                raise RuntimeError(f"log-probabilities differ by {gap}")
            for way in ("by layer", "at once"):
                case = {
                    clock: reports.summary(turns.ratios(clock, way))
                    for clock in ("wall", "cpu")
                }
                name = f"{load}, {way}, {dtype}"
                report["cases"][name] = {**case, "seconds": seconds, "difference": gap}
                medians = {c: round(one["median"], 2) for c, one in case.items()}
                print(f"{name:32} {medians}, logprobs differ by {gap:.1g}", flush=True)
            reports.save(report, options.out)
    finally:
        server.close()


def main() -> None:
    """Measure, print, and write JSON and plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="of the Llama architecture")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=1, help="per turn")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    every = ["bfloat16", "float32"]
    parser.add_argument("--dtypes", nargs="+", choices=every, default=every)
    default = WORK / "readouts_client.json"
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of both")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    load = os.getloadavg()
    report: dict[str, Any] = {**reports.begun(), "cases": {}}
    report["threads"] = options.threads
    if options.model is None:
        report["model"] = "30 layers of width 576, 49,152 tokens, random weights"
        made = random_llama(WORK / "models", 30, 576, vocab_size=49152)
        options.model = made.folder
    else:
        report["model"] = options.model.name
    for dtype in options.dtypes:
        measure(dtype, options, report)
    report["machine"] = reports.machine(load)
    reports.write(report, options.out)


if __name__ == "__main__":
    main()
