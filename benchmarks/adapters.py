# SPDX-License-Identifier: Apache-2.0
"""What each adapter in `vllm/interop` costs over our own call for the same rows.

    python benchmarks/adapters.py --out benchmarks/results/DATE-adapters-cpu.json
    python benchmarks/adapters.py --model build/models/SmolLM2-135M-Instruct --out ...

Without `--model`, the demo model runs short calls, whose fixed costs weigh most; with
it, prompts have 128 tokens and answers 64, with rows of four layers.

One process per adapter, with an environment of its peer library where the adapter
needs it. Adapter and own call alternate on one engine (or on two alike, where what is
measured is a setting of the engine); the order changes every turn. The cost is the CPU
time of the process and its children, which a busy machine changes less than elapsed
time; each turn gives a ratio, and the medians of these are compared with the goal.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "client")]

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import psutil  # noqa: E402
import torch  # noqa: E402

from benchmarks.harness import goals, reports  # noqa: E402

PHRASE = "Anna went home and the dog was there. "


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What each call does."""

    model: str
    layers: list[int]
    prompts: int
    length: int
    """Tokens per prompt."""
    generated: int
    """Tokens of an answer, where an adapter generates."""
    chat_repeats: int
    """How often a chat message of Inspect has `PHRASE`, of ten tokens or so."""
    chat_generated: int
    template: str | None = None
    """Chat template, for a model without one."""

    @property
    def engine(self) -> dict[str, Any]:
        """Options of every engine."""
        return {
            "max_model_len": self.length + self.generated + 24,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "gpu_memory_utilization": 0.2,
        }

    def tokens(self) -> list[list[int]]:
        """The prompts."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.prompts, self.length)
        return torch.randint(3, 1000, shape, generator=generator).tolist()

    def inputs(self) -> list[Any]:
        """The prompts as an engine takes them."""
        from vllm.inputs import TokensPrompt

        return [TokensPrompt(prompt_token_ids=ids) for ids in self.tokens()]

    def inline(self, positions: str) -> dict[str, Any]:
        """Our own request for rows."""
        hooks = {"post_block": self.layers}
        return {"inline": {"hooks": hooks, "positions": positions}}

    def chat(self) -> str:
        """The message of a chat."""
        return PHRASE * self.chat_repeats

    def chat_fields(self) -> dict[str, Any]:
        """The further fields of a chat request."""
        positions = "all_prompt" if self.chat_generated == 1 else "all"
        return {"capture": self.inline(positions), "ignore_eos": True}


def toy() -> Workload:
    """The demo model, and calls that are nearly over before they begin."""
    return Workload(
        model=str(ROOT / "examples" / "demo_model" / "weights"),
        layers=[1, 3],
        prompts=16,
        length=96,
        generated=8,
        chat_repeats=24,
        chat_generated=1,
        template="{% for m in messages %}{{ m['content'] }}{% endfor %}",
    )


def of_model(folder: Path) -> Workload:
    """A model with a chat template, and calls as users make them."""
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    return Workload(
        model=str(folder.resolve()),
        layers=[layers * part // 4 - 1 for part in (1, 2, 3, 4)],
        prompts=4,
        length=128,
        generated=64,
        chat_repeats=12,
        chat_generated=64,
    )


PEERS = {
    "transformer_lens": "transformer_lens",
    "inspect_ai": "inspect_ai",
    "inspect_ai_alone": "inspect_ai",
}
"""The environment that an adapter needs."""

MARK = "measured "
"""How the line of a child begins that holds its result."""

Pair = tuple[Callable[[], Any], Callable[[], Any]]
"""The adapter's call and ours."""


def params(**more: Any) -> Any:
    """Greedy, without text."""
    from vllm import SamplingParams

    chosen = {"max_tokens": 1, "temperature": 0, "detokenize": False}
    return SamplingParams(**chosen | {"ignore_eos": True} | more)


def rows_in(outputs: list[Any], instance: str = "inline") -> int:
    """Reads every row of our own outputs, and counts them."""
    found = [output.capture_results[instance].payload for output in outputs]
    return sum(len(rows) for payload in found for rows in payload.values())


@contextmanager
def vllm_lens(work: Workload) -> Iterator[Pair]:
    """`output_residual_stream` and `output.activations`."""
    from vllm import LLM

    options = {"vllm_lens_api": True, "capture_consumers": ["inline"]}
    llm = LLM(work.model, **work.engine, **options)

    def theirs() -> Any:
        args = {"output_residual_stream": work.layers}
        asked = params(max_tokens=work.generated, extra_args=args)
        outputs = llm.generate(work.inputs(), asked, use_tqdm=False)
        return [output.activations["residual_stream"] for output in outputs]

    def ours() -> Any:
        asked = params(max_tokens=work.generated, capture=work.inline("all"))
        return rows_in(llm.generate(work.inputs(), asked, use_tqdm=False))

    yield theirs, ours


@contextmanager
def probe_hook(work: Workload) -> Iterator[Pair]:
    """`vllm_probe_hook.LLM`, a row per output token."""
    from vllm_probe_hook import LLM

    from vllm import LLM as EngineLLM
    from vllm.interop.probe_hook.rows import GENERATED, PROMPT

    llm = LLM(work.model, layers=work.layers, dtype="auto", **work.engine)

    def theirs() -> Any:
        asked = params(max_tokens=work.generated)
        outputs = llm.generate(work.inputs(), asked, use_tqdm=False)
        return [output.hidden_states for output in outputs]

    def ours() -> Any:  # the last prompt token's row predicts the first output token
        hooks = {"post_block": work.layers}
        capture = {
            PROMPT: {"hooks": hooks, "positions": "last_prompt"},
            GENERATED: {"hooks": hooks, "positions": "all_generated"},
        }
        asked = params(max_tokens=work.generated, capture=capture)
        outputs = EngineLLM.generate(llm, work.inputs(), asked, use_tqdm=False)
        return [rows_in(outputs, name) for name in capture]

    yield theirs, ours


@contextmanager
def activation_capture(work: Workload) -> Iterator[Pair]:
    """`VLLM_ACT_CAPTURE=1` beside the filesystem consumer with the same codec."""
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        stored = {
            "root": f"{folder}/own",
            "codec": "rp8",
            "global_hooks": {"post_block": "all"},
            "global_positions": "all",
        }
        consumer = {"name": "filesystem", "params": stored}
        own = LLM(work.model, capture_consumers=[consumer], **work.engine)
        os.environ |= {"VLLM_ACT_CAPTURE": "1", "VLLM_ACT_OUTDIR": f"{folder}/theirs"}
        llm = LLM(work.model, **work.engine)
        asked = params(max_tokens=work.generated)
        yield (
            lambda: llm.generate(work.inputs(), asked, use_tqdm=False),
            lambda: own.generate(work.inputs(), asked, use_tqdm=False),
        )


@contextmanager
def interp_engine(work: Workload) -> Iterator[Pair]:
    """`EngineAPI.capture` beside `AsyncLLM.generate`."""
    from vllm.interop.interp_engine.model import ServedModel
    from vllm.sampling_params import RequestOutputKind

    loop = asyncio.new_event_loop()

    async def start() -> Any:
        return ServedModel.load(work.model, **work.engine)

    model = loop.run_until_complete(start())
    points = [f"resid_post.{layer}" for layer in work.layers]

    async def last(number: int, prompt: Any) -> Any:
        asked = params(capture=work.inline("all_prompt"))
        asked.output_kind = RequestOutputKind.FINAL_ONLY
        async for output in model.engine.generate(prompt, asked, f"own-{number}"):
            found = output
        return found

    async def theirs() -> Any:
        every = [model.capture(ids, points) for ids in work.tokens()]
        return await asyncio.gather(*every)

    async def ours() -> Any:
        every = [last(number, prompt) for number, prompt in enumerate(work.inputs())]
        return rows_in(await asyncio.gather(*every))

    yield (
        lambda: loop.run_until_complete(theirs()),
        lambda: loop.run_until_complete(ours()),
    )


@contextmanager
def transformer_lens(work: Workload) -> Iterator[Pair]:
    """`Driver.forward` with `capture`."""
    from vllm import LLM
    from vllm.interop.transformer_lens import ENGINE as NEEDED
    from vllm.interop.transformer_lens import boot

    llm = LLM(work.model, **work.engine | NEEDED)
    bridge = boot(llm)
    names = tuple(f"blocks.{layer}.hook_out" for layer in work.layers)
    ids = torch.tensor(work.tokens())
    asked = params(capture=work.inline("all_prompt"))
    yield (
        lambda: bridge._driver.forward(ids, capture=names, return_logits=False),
        lambda: rows_in(llm.generate(work.inputs(), asked, use_tqdm=False)),
    )


@contextmanager
def saelens(work: Workload) -> Iterator[Pair]:
    """`run_with_cache`, as SAELens' store calls it."""
    from vllm.interop.saelens import ServedModel

    model = ServedModel.start(work.model, **work.engine)
    names = [f"blocks.{layer}.hook_resid_post" for layer in work.layers]
    ids = torch.tensor(work.tokens())
    asked = params(capture=work.inline("all_prompt"))
    yield (
        lambda: model.run_with_cache(ids, names_filter=names, prepend_bos=False),
        lambda: rows_in(model.llm.generate(work.inputs(), asked, use_tqdm=False)),
    )


@contextmanager
def inspect_ai(work: Workload) -> Iterator[Pair]:
    """`clearbox/MODEL` beside the client of the distribution, over one server."""
    from clearbox_client import Client

    with inspect_server(work) as url, Client(url) as client:

        def ours() -> Any:
            for _ in range(work.prompts):
                said = [{"role": "user", "content": work.chat()}]
                tokens = work.chat_generated
                client.chat(
                    said, max_tokens=tokens, temperature=0, **work.chat_fields()
                )

        yield inspect_calls(work, "clearbox", url, client.model), ours


@contextmanager
def inspect_ai_alone(work: Workload) -> Iterator[Pair]:
    """`clearbox/MODEL` beside Inspect's own `vllm/MODEL`, which decodes no rows."""
    from clearbox_client import Client

    with inspect_server(work) as url, Client(url) as client:
        name = client.model
        yield (
            inspect_calls(work, "clearbox", url, name),
            inspect_calls(work, "vllm", url, name),
        )


@contextmanager
def inspect_server(work: Workload) -> Iterator[str]:
    """The URL of a server for Inspect."""
    from tests.support.server import Server

    options = ["--enforce-eager", "--max-model-len", "512", "--vllm-lens-api"]
    options += ["--capture-consumers", "inline"]
    options += ["--no-enable-prefix-caching", "--enable-readouts"]
    if work.template is not None:
        options += ["--chat-template", work.template]
    with tempfile.TemporaryDirectory() as folder:
        linked = Path(folder) / "model"
        linked.symlink_to(work.model)
        server = Server(linked, *options)
        try:
            yield server.url
        finally:
            server.close()


def inspect_calls(
    work: Workload, provider: str, url: str, served: str
) -> Callable[[], Any]:
    """A function that generates through one of Inspect's providers."""
    from inspect_ai.model import ChatMessageUser, GenerateConfig, get_model

    config = GenerateConfig(
        max_tokens=work.chat_generated, temperature=0, extra_body=work.chat_fields()
    )
    name = f"{provider}/{served}"
    model = get_model(name, base_url=f"{url}/v1", memoize=False)
    loop = asyncio.new_event_loop()

    def call() -> None:
        for _ in range(work.prompts):
            text = work.chat()
            said: list[Any] = [ChatMessageUser(content=text)]
            loop.run_until_complete(model.generate(said, config=config))

    return call


ADAPTERS: dict[str, Callable[[Workload], Any]] = {
    one.__name__: one
    for one in (
        vllm_lens,
        probe_hook,
        activation_capture,
        interp_engine,
        transformer_lens,
        saelens,
        inspect_ai,
        inspect_ai_alone,
    )
}


def cpu_seconds() -> float:
    """CPU time of this process and its children so far.

    That of children comes in steps of 10 ms, which is why means are compared.
    """
    children = psutil.Process().children(recursive=True)
    times = [one.cpu_times() for one in children]
    return process_time() + sum(one.user + one.system for one in times)


def measure(name: str, work: Workload, turns: int) -> dict[str, Any]:
    """CPU seconds and elapsed seconds of both calls, turn by turn."""
    taken: dict[str, list[tuple[float, float]]] = {"adapter": [], "own": []}
    with ADAPTERS[name](work) as pair:
        calls = dict(zip(taken, pair))
        for turn in range(turns + 2):
            for side in sorted(calls, reverse=turn % 2 == 1):
                began, cpu = perf_counter(), cpu_seconds()
                calls[side]()
                cost = cpu_seconds() - cpu, perf_counter() - began
                if turn >= 2:  # the first warm up
                    taken[side].append(cost)
    return taken


def child(name: str, turns: int, model: Path | None) -> dict[str, Any]:
    """`measure` in a process of its own."""
    from tests.interop.environment import prepare

    python = str(prepare(PEERS[name])) if name in PEERS else sys.executable
    command = [python, __file__, "--one", name, "--turns", str(turns)]
    if model is not None:
        command += ["--model", str(model)]
    alone = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if name != "interp_engine" else {}
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **alone}
    )
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    (said,) = [one for one in done.stdout.splitlines() if one.startswith(MARK)]
    found: dict[str, Any] = json.loads(said.removeprefix(MARK))
    return found


def case_of(taken: dict[str, Any]) -> dict[str, Any]:
    """The report of an adapter: ratios by turn, and milliseconds of CPU time."""
    pairs = list(zip(taken["adapter"], taken["own"], strict=True))
    cpu, elapsed = (
        reports.summary([theirs[column] / ours[column] for theirs, ours in pairs])
        for column in (0, 1)
    )
    milliseconds = {
        side: statistics.median(cost[0] for cost in costs) * 1e3
        for side, costs in taken.items()
    }
    return {"cpu": cpu, "elapsed": elapsed, "cpu_ms": milliseconds}


def line(name: str, case: dict[str, Any]) -> str:
    """A row of the table."""
    cpu, times = case["cpu"], case["cpu_ms"]
    mark = "" if cpu["median"] <= goals.ADAPTERS.value else " (over the goal)"
    bounds = [case[base]["interval"] for base in ("cpu", "elapsed")]
    intervals = [f"{low:.3f} to {high:.3f}" for low, high in bounds]
    return (
        f"| `{name}` | {times['adapter']:.0f} | {times['own']:.0f} "
        f"| **{cpu['median']:.3f}**{mark} | {intervals[0]} "
        f"| {case['elapsed']['median']:.3f} | {intervals[1]} |"
    )


def main() -> None:
    """Measure all adapters, or one in this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument(
        "--model", type=Path, help="a folder; without it, the demo model"
    )
    parser.add_argument("--adapters", nargs="+", default=list(ADAPTERS))
    parser.add_argument("--one", choices=list(ADAPTERS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    work = toy() if args.model is None else of_model(args.model)
    if args.one:
        print(MARK + json.dumps(measure(args.one, work, args.turns)), flush=True)
        return
    load = os.getloadavg()
    facts = asdict(work) | {"model": Path(work.model).name}
    report: dict[str, Any] = {**reports.begun(), "turns": args.turns, **facts}
    report["cases"] = {}
    for name in args.adapters:
        case = report["cases"][name] = case_of(child(name, args.turns, args.model))
        print(line(name, case), flush=True)
    report["machine"] = reports.machine(load)
    if args.out:
        reports.write(report, args.out)


if __name__ == "__main__":
    main()
