# SPDX-License-Identifier: Apache-2.0
"""An engine in its own process whose decode-step graphs are replayed.

    python benchmarks/harness/decode_graphs.py MODEL FEATURES BATCHES

Started by `decode_step.py` with upstream's vLLM and with the fork's. The first answer
describes the engine. Then each request names a case and a batch size, answered with the
milliseconds of one replay, or asks to record all graphs again.
"""

import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# For `benchmarks`; at the end, as the checkout has a folder `vllm` too.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.child import answers, requests
from benchmarks.harness.llamas import model_folder

PLAIN = "plain"
"""The case without capture and steering, which upstream also has."""
CONFIGS = 64
WIDEST = 16
"""Staging rows that a row of any point fits into."""
WARM_UP, REPLAYS = 5, 10


class Graphs:
    """An engine, and the graphs of its decode steps."""

    def __init__(self, model: str, features: str, batches: list[int]) -> None:
        """Start the engine; `features` are "capture", "steering" and hook points."""
        from vllm import LLM

        extra: dict[str, Any] = {}
        if "capture" in features:
            extra["capture_consumers"] = ["logging"]
        if "steering" in features:
            extra["enable_steering"] = True
            extra["max_steering_configs"] = CONFIGS
        self._points = [
            one for one in features.split() if one not in ("capture", "steering")
        ]
        if self._points:
            extra["hook_points"] = self._points
        begin = time.perf_counter()
        self._llm = LLM(
            model=model_folder(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=2048,
            max_num_seqs=256,
            gpu_memory_utilization=0.4,
            kv_cache_memory_bytes=8 << 30,  # the GPU is shared with the other engine
            compilation_config={"cudagraph_capture_sizes": batches},
            **extra,
        )
        self._start_seconds = time.perf_counter() - begin
        self._runner = (
            self._llm.llm_engine.model_executor.driver_worker.worker.model_runner
        )
        self._batches = batches
        self._has_features = bool(features)
        self._cases: dict[str, Case] = {}
        self._prepared: tuple[str, int] | None = None
        self._tokens = self._find_cases()

    def about(self) -> dict[str, Any]:
        """The engine's description for the report."""
        import torch

        return {
            "cases": list(self._cases),
            "tokens": self._tokens,
            "start_seconds": self._start_seconds,
            "peak_memory_bytes": torch.cuda.memory_stats()["reserved_bytes.all.peak"],
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
        }

    def record(self) -> list[list[int]]:
        """Record all graphs again, in other memory, and generate greedy tokens.

        Two recordings of the same work differ by up to 1.4 %, as the time of a matrix
        product depends on the addresses of its operands and the placement of its
        blocks. Earlier graphs, including those of prompts, must not be replayed: the
        memory that they read may have been freed.
        """
        from vllm.compilation.cuda_graph import CUDAGraphWrapper

        if has_manager(self._runner):
            self._runner.cudagraph_manager.release_graphs()
        CUDAGraphWrapper.clear_all_graphs()
        self._runner.capture_model()
        return self._find_cases()

    def milliseconds(self, case: str, batch: int) -> float:
        """Milliseconds of one replay, as the mean of many."""
        import torch

        chosen = self._cases[case]
        if self._prepared != (case, batch):
            chosen.prepare(self._runner, batch)
            self._prepared = case, batch
        graph = chosen.graphs[batch]
        for _ in range(WARM_UP):
            graph.replay()
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end) / REPLAYS
        return milliseconds

    def _find_cases(self) -> list[list[int]]:
        """Collect the existing graphs and record those of further cases."""
        plain = {
            one.num_tokens: graph
            for one, graph in recorded(self._runner).items()
            if not getattr(one, "tapped", 0)
        }
        make = cases_inside if self._points else cases
        made = make(self._runner, self._batches) if self._has_features else ()
        self._cases |= {case.name: case for case in (Case(PLAIN, plain), *made)}
        self._prepared = None
        # After recording, which leaves dummy lengths in the inputs that a replay would
        # read.
        generated = self._generate()
        self._draw_tokens()
        return generated

    def _draw_tokens(self) -> None:
        """Give each row of the largest batch a different token.

        With equal rows matrix products take less power, so the GPU's clock is higher:
        with 256 rows and width 4096 by a tenth.
        """
        import torch

        draw = torch.Generator().manual_seed(6)
        drawn = torch.randint(32000, (max(self._batches),), generator=draw)
        if has_manager(self._runner):
            self._runner.input_buffers.input_ids[: len(drawn)] = drawn
        else:
            self._runner.input_ids.gpu[: len(drawn)] = drawn

    def _generate(self) -> list[list[int]]:
        """Greedy tokens for some random prompts."""
        import torch

        from vllm import SamplingParams

        draw = torch.Generator().manual_seed(5)
        prompts: list[Any] = [
            {"prompt_token_ids": torch.randint(32000, (20,), generator=draw).tolist()}
            for _ in range(16)
        ]
        params = SamplingParams(
            temperature=0, max_tokens=48, ignore_eos=True, detokenize=False
        )
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


@dataclass(frozen=True)
class Case:
    """What a step captures or steers, and its graphs."""

    name: str
    graphs: dict[int, Any]
    captured: list[Any] = field(default_factory=list)
    steered: list[Any] = field(default_factory=list)
    configs: int = 0
    programs: list[dict[Any, Any]] = field(default_factory=list)
    """Programs by hook point, assigned to tokens in turn."""
    alone: bool = False
    """Whether only the first token has a program."""

    def prepare(self, runner, batch) -> None:  # type: ignore[no-untyped-def]
        """Fill the memory that graphs read as a real step would."""
        import torch

        if self.name == PLAIN:
            return  # Its graphs read nothing of ours.
        capture, steering = runner.residual._capture, runner.residual.steering
        if capture is not None:
            capture._slots.of_taps.fill_(-1)
            capture._slots.base.zero_()
            if self.captured:
                columns = [capture._columns[tap] for tap in self.captured]
                rows = torch.arange(batch * len(columns), dtype=torch.int32)
                rows = rows.remainder(capture._staging.rows.shape[0] - WIDEST)
                rows = rows.view(batch, len(columns)).to(capture._slots.of_taps.device)
                capture._slots.of_taps[columns, :batch] = rows.T
        if steering is not None:
            steering.row_index.zero_()
            steering.program_rows.zero_()
            if self.programs:
                self._prepare_programs(steering, batch)
            if self.steered:
                for tap in self.steered:
                    steering.tables.at(tap)[1:].normal_(0, 1e-3)
                generator = torch.Generator().manual_seed(7)
                steering.row_index.copy_(
                    torch.randint(
                        3,
                        3 + 2 * self.configs,
                        steering.row_index.shape,
                        dtype=torch.int32,
                        generator=generator,
                    )
                )

    def _prepare_programs(self, steering, batch) -> None:  # type: ignore[no-untyped-def]
        """Assign programs to tokens, as a step with position selectors does."""
        import torch

        from vllm.v1.steering.worker.programs import place

        index, rows = steering.tables.programs, steering.program_rows
        index.write_special([place(one, rows.device) for one in self.programs])
        count = 1 if self.alone else batch
        number = torch.arange(count, device=rows.device) % len(self.programs)
        rows[:count] = (index.first_special + number).to(rows.dtype)


def has_manager(runner):  # type: ignore[no-untyped-def]
    """Whether this is the V2 runner, which can record graphs at any time."""
    return runner.vllm_config.use_v2_model_runner


def recorded(runner):  # type: ignore[no-untyped-def]
    """The graphs of decode steps, by their keys."""
    if has_manager(runner):
        graphs = runner.cudagraph_manager.graphs.items()
        return {key: graph for key, graph in graphs if key.uniform_token_count == 1}
    entries = runner.model.concrete_cudagraph_entries.items()
    return {key: entry.cudagraph for key, entry in entries if key.uniform}


def program_cases(runner, taps):  # type: ignore[no-untyped-def]
    """Programs other than additions, by name of the case.

    The values do not matter, but each instruction must change its row, as it would
    write nothing otherwise.
    """
    import torch

    from vllm.model_executor.layers.residual.program import Flag, Instruction, Kind

    steering = runner.residual.steering
    width, device = steering.tables.at(taps[0]).shape[1], steering.row_index.device

    def unit(count=1):  # type: ignore[no-untyped-def]
        drawn = torch.randn(count, width, device=device)
        return drawn / drawn.norm(dim=-1, keepdim=True)

    def project(u):  # type: ignore[no-untyped-def]
        return (Instruction(Kind.LINEAR, u, flags=Flag.DOT, c2=-0.1),)

    def clamp(u):  # type: ignore[no-untyped-def]
        bounds = {"low": 1.0, "high": 1.0}
        return (Instruction(Kind.LINEAR, u, flags=Flag.DOT, c3=0.1, **bounds),)

    layers = sorted({layer for layer, _ in taps})
    middle = layers[len(layers) // 2]
    one, behind = [(middle, "post_block")], [t for t in taps if t[1] == "post_block"]
    gated = one + [t for t in behind if t[0] > middle][:10]
    u, v = unit(), unit()
    matched = (Instruction(Kind.LINEAR, v, flags=Flag.SAVE_NORM, c1=1e-3),)
    probe = (Instruction(Kind.PROBE, u, c2=-99.0, c3=1.0, gate=0),)
    acts = (Instruction(Kind.LINEAR, v, c0=1e-3, gate=0),)
    many = [{tap: project(unit()) for tap in taps} for _ in range(16)]
    different = [{one[0]: project(row[None])} for row in unit(256)]
    yield "one token clamped at all layers", behind, [{t: clamp(u) for t in behind}]
    yield "all projected at one layer", one, [{one[0]: project(u)}]
    yield "all projected at all layers", behind, [{t: project(u) for t in behind}]
    yield "all projected at all points, 16 configs", taps, many
    yield "all norm-matched at one layer", one, [{one[0]: matched}]
    every = {t: probe if t == one[0] else acts for t in gated}
    yield "all gated at one layer, acting at ten", gated, [every]
    yield "256 programs at one point", one, different


def cases(runner, batches):  # type: ignore[no-untyped-def]
    """The cases of the enabled features, with their graphs.

    Steps that launch few ops have two kinds of graphs: those recorded when the engine
    starts, and those recorded after enough steps could have used them.
    """
    capture, steering = runner.residual._capture, runner.residual.steering
    # Without the places behind interventions, which have nothing to steer.
    taps = sorted(tap for tap in (capture or steering).addresses if "." not in tap[1])
    layers = sorted({layer for layer, _ in taps})
    one = [(layers[len(layers) // 2], "post_block")]
    behind = [tap for tap in taps if tap[1] == "post_block"]
    at_start = ", in a graph of the start"

    def graphs(addresses, where, exact=True):  # type: ignore[no-untyped-def]
        ops = frozenset(addresses[tap] for tap in where)
        return {batch: graph_for(runner, batch, ops, exact) for batch in batches}

    if capture is not None:
        known = capture.addresses
        yield Case("nothing captured" + at_start, graphs(known, behind))
        yield Case("one layer captured" + at_start, graphs(known, one, False), one)
        yield Case("one layer captured", graphs(known, one), one)
        yield Case("all layers captured", graphs(known, behind), behind)
        yield Case("all layers and hooks captured", graphs(known, taps), taps)
    if steering is not None:
        known = steering.addresses
        some = "one layer steered, 16 configs"
        yield Case(some + at_start, graphs(known, one, False), [], one, 16)
        yield Case(some, graphs(known, one), [], one, 16)
        for configs in (16, CONFIGS):
            name = f"all layers and hooks steered, {configs} configs"
            yield Case(name, graphs(known, taps), [], taps, configs)
        known = steering.program_addresses
        for name, where, programs in program_cases(runner, taps):
            alone = name.startswith("one token")
            yield Case(name, graphs(known, where), programs=programs, alone=alone)


def cases_inside(runner, batches):  # type: ignore[no-untyped-def]
    """Each point inside the block, captured and changed at one layer."""
    import torch

    from vllm.model_executor.layers.residual.program import Flag, Instruction, Kind

    capture, steering = runner.residual._capture, runner.residual.steering
    shapes, hidden = runner.residual.point_shapes, capture._staging.rows.shape[1]
    for point in dict.fromkeys(hook for _, hook in steering.program_addresses):
        having = sorted(tap for tap in capture.addresses if tap[1] == point)
        one = having[len(having) // 2]
        width, _ = shapes.get(one[0], {}).get(point, (hidden, 0))
        unit = torch.nn.functional.normalize(
            torch.randn(1, width, device=steering.row_index.device)
        )
        project = (Instruction(Kind.LINEAR, unit, flags=Flag.DOT, c2=-0.1),)
        for name, op, more in (
            ("captured", capture.addresses[one], {"captured": [one]}),
            (
                "projected",
                steering.program_addresses[one],
                {"programs": [{one: project}]},
            ),
        ):
            ops = frozenset([op])
            graphs = {batch: graph_for(runner, batch, ops, True) for batch in batches}
            yield Case(f"{point} {name} at one layer", graphs, **more)


def graph_for(runner, batch, ops, exact):  # type: ignore[no-untyped-def]
    """The graph recorded at the start that has these ops, or an exact one made now.

    The V1 runner has those of the start only.
    """
    from vllm.model_executor.layers.residual.capture_op import Launch

    graphs = recorded(runner)
    plain = next(k for k in graphs if (k.num_tokens, k.tapped) == (batch, 0))
    may_record = exact and has_manager(runner)
    if may_record and ops not in Launch.families:
        Launch.families = (*Launch.families, ops)
    sizes = {
        family: len(launched)
        for family, launched in enumerate(Launch.families)
        if ops <= launched
    }
    if not may_record:
        sizes = {f: n for f, n in sizes.items() if replace(plain, tapped=f) in graphs}
    chosen = replace(plain, tapped=min(sizes, key=sizes.__getitem__))
    if chosen not in graphs:
        runner.cudagraph_manager.residual_recorder(chosen)
    return recorded(runner)[chosen]


def main() -> None:
    """Start the engine and serve requests."""
    answer = answers()
    model, features, batches = sys.argv[1:]
    graphs = Graphs(model, features, [int(batch) for batch in batches.split(",")])
    answer(graphs.about())
    for request in requests():
        answer(graphs.milliseconds(**request) if request else graphs.record())


if __name__ == "__main__":
    main()
