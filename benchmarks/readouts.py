# SPDX-License-Identifier: Apache-2.0
"""Claim: what readouts cost a server on a GPU, against the same server without them.

    python benchmarks/readouts.py --model 8b --out benchmarks/results/readouts.json
    python benchmarks/readouts.py --cpu      the lens against a client's own, on a CPU

On a GPU two engines in processes of their own, one without the feature (which is
upstream, bit for bit) and one with it, take turns at the same batch. A token's time is
that of a long batch less that of a short one, over the tokens between them; a round is
off, case, off, and its ratio is the case over the mean of the two. Dummy weights.

On a CPU one server answers the same requests twice: with a lens of all layers, and with
all rows in the response (`inline`), from which the client computes the same lens. Both
are timed end to end, and their results are compared.
"""

import argparse
import base64
import gc
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # At the end, as the checkout has a folder `vllm` too.

from benchmarks.harness import reports  # noqa: E402
from benchmarks.harness.llamas import MODELS, describe, model_folder  # noqa: E402

REQUESTS, SHORT, LONG, PROMPT = 32, 16, 112, 256
LAYER = 12

GOALS = {
    "one probe": 1.01,
    "256 probes": 1.01,
    "SAE of 65,536 features, top 32": 1.05,
    "lens of all layers, top 5, 1 of 32": 1.05,
    "lens of all layers, top 5, 8 of 32": 1.10,
}


@dataclass(frozen=True, slots=True)
class Case:
    """The readouts of some requests of a batch."""

    name: str
    readouts: dict[str, Any]
    requests: int = REQUESTS
    rows_a_token: int = 1


def cases(layers: int) -> list[Case]:
    """The cases, by the layers of the model."""
    probe = {"kind": "probe", "probe": "one"}
    many = {"kind": "probe", "probe": "many"}
    sae = {"kind": "sae", "sae": "features", "top_k": 32}
    lens = {"kind": "lens", "layers": "all", "top_k": 5}
    return [
        Case("nobody reads out", {}, 0),
        Case("one probe", {"r": probe}),
        Case("256 probes", {"r": many}),
        Case("SAE of 65,536 features, top 32", {"r": sae}),
        Case("lens of all layers, top 5, 1 of 32", {"r": lens}, 1, layers),
        Case("lens of all layers, top 5, 8 of 32", {"r": lens}, 8, layers),
    ]


def write_modules(folder: Path, width: int) -> dict[str, Any]:
    """Write modules with random weights; the engine arguments that load them."""
    import json

    import torch
    from safetensors.torch import save_file

    from vllm.v1.readouts.modules import save_probe

    layer = min(LAYER, 2) if width < 1024 else LAYER
    files = {}
    for name, count in (("one", 1), ("many", 256)):
        files[name] = str(folder / f"{name}.safetensors")
        save_probe(files[name], torch.randn(count, width), layer=layer)
    sae, features = folder / "sae", 65536 if width >= 1024 else 512
    sae.mkdir()
    weight = torch.randn(width, features, dtype=torch.bfloat16)
    tensors = {
        "W_enc": weight,
        "W_dec": weight.T.contiguous(),
        "b_enc": torch.zeros(features, dtype=torch.bfloat16),
        "b_dec": torch.zeros(width, dtype=torch.bfloat16),
        "threshold": torch.full((features,), 0.5, dtype=torch.bfloat16),
    }
    save_file(tensors, sae / "sae_weights.safetensors")
    config = {
        "architecture": "jumprelu",
        "apply_b_dec_to_input": False,
        "hook_name": f"blocks.{layer}.hook_resid_post",
    }
    (sae / "cfg.json").write_text(json.dumps(config))
    return {"readout_modules": files, "sae": {"features": str(sae)}}


def engine(model: str, **options: Any) -> Any:
    """An engine with its core in a separate process."""
    from vllm import LLM

    return LLM(
        model=model_folder(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=4608,
        max_num_seqs=REQUESTS,
        gpu_memory_utilization=0.42,
        enable_prefix_caching=False,
        disable_log_stats=True,
        compilation_config={"cudagraph_capture_sizes": [1, 8, 16, 32]},
        seed=0,
        **options,
    )


def timed(llm: Any, case: Case, tokens: int, length: int = PROMPT) -> tuple[float, Any]:
    """Seconds for a batch, and its outputs."""
    from vllm import SamplingParams

    prompts = [
        {"prompt_token_ids": [(7 * i + 13 * j) % 31000 + 8 for j in range(length)]}
        for i in range(REQUESTS if length == PROMPT else 8)
    ]
    params = [
        SamplingParams(
            max_tokens=tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            readouts=case.readouts if number < case.requests else None,
        )
        for number in range(len(prompts))
    ]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - began, outputs


def token_seconds(llm: Any, case: Case) -> float:
    """Seconds per token of the whole batch."""
    short = timed(llm, case, SHORT)[0]
    return (timed(llm, case, LONG)[0] - short) / (LONG - SHORT)


def measure(off: Any, on: Any, case: Case, rounds: int) -> dict[str, Any]:
    """Ratios of one case, and the fraction of its rows' bytes copied to the host."""
    nothing = Case("off", {}, 0)
    timed(on, case, LONG)  # Compiles, records and fills caches.
    timed(off, nothing, SHORT)
    ratios, base = [], []
    for _ in range(rounds):
        before = token_seconds(off, nothing)
        own = token_seconds(on, case)
        after = token_seconds(off, nothing)
        ratios.append(own / ((before + after) / 2))
        base += [before, after]
    _, outputs = timed(on, case, SHORT)
    found = [o.readouts["r"] for o in outputs if o.readouts]
    moved = sum(a.nbytes for one in found for a in one.arrays.values())
    rows = sum(len(one.positions) for one in found) * case.rows_a_token
    return {
        **reports.summary(ratios),
        "off_ms": statistics.median(base) * 1e3,
        "bytes_of_rows": moved / (rows * 2 * MODELS["8b"]["hidden_size"])
        if rows
        else 0.0,
    }


def measure_mean(off: Any, on: Any, rounds: int) -> dict[str, Any]:
    """Throughput of prompts of 4,096 tokens with the mean row of all layers."""
    mean = {"kind": "rows", "hooks": {"post_block": "all"}, "reduce": "mean"}
    case = Case("mean", {"r": mean | {"positions": "all_prompt"}})
    nothing = Case("off", {}, 0)
    timed(on, case, 1, 4096)
    timed(off, nothing, 1, 4096)
    ratios = []
    for _ in range(rounds):
        before = timed(off, nothing, 1, 4096)[0]
        own = timed(on, case, 1, 4096)[0]
        after = timed(off, nothing, 1, 4096)[0]
        ratios.append((before + after) / 2 / own)
    return reports.summary(ratios)


def check(on: Any) -> dict[str, float]:
    """Compare the engine's results with its own rows, in graphs and bfloat16."""
    import numpy as np
    import torch

    spec = {
        "r": {"kind": "probe", "probe": "many", "positions": "all"},
        "rows": {"kind": "rows", "hooks": {"post_block": [LAYER]}, "positions": "all"},
        "norm": {"kind": "norm", "hooks": {"post_block": [LAYER]}, "positions": "all"},
        "sum": {
            "kind": "rows",
            "hooks": {"post_block": [LAYER]},
            "positions": "all",
            "reduce": "mean",
        },
    }
    _, outputs = timed(on, Case("check", spec), SHORT)
    errors = {"norm": 0.0, "mean": 0.0}
    for output in outputs:
        found = output.readouts
        assert all(one.error is None for one in found.values()), found
        rows = torch.from_numpy(np.asarray(found["rows"]["rows"])).float()[:, 0]
        assert len(rows) == PROMPT + SHORT - 1
        norm = torch.from_numpy(np.asarray(found["norm"]["norm"]))[:, 0]
        gap = ((rows.norm(dim=-1) - norm).abs() / norm).max().item()
        errors["norm"] = max(errors["norm"], gap)
        mean = torch.from_numpy(np.asarray(found["sum"]["rows"]))[0]
        gap = ((rows.mean(0) - mean).norm() / mean.norm()).item()
        errors["mean"] = max(errors["mean"], gap)
    return errors


def on_gpu(options: argparse.Namespace) -> dict[str, Any]:
    """Both engines, then the cases one after another; each is printed at once."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    size = MODELS[options.model]
    head = reports.begun()
    report: dict[str, Any] = {"kind": "readouts", **head}
    report["model"] = describe(options.model)
    report["cases"] = {}
    with tempfile.TemporaryDirectory() as folder:
        modules = write_modules(Path(folder), size["hidden_size"])
        off, on = engine(options.model), engine(options.model, **modules)
        report["errors"] = check(on)
        print("errors against the engine's own rows:", report["errors"], flush=True)
        for case in cases(size["num_hidden_layers"]):
            found = measure(off, on, case, options.rounds)
            found["goal"] = GOALS.get(case.name)
            report["cases"][case.name] = found
            print(f"{case.name:38} {found}", flush=True)
            reports.save(report, options.out)
        found = measure_mean(off, on, options.rounds)
        report["cases"]["mean row of all layers, prompts of 4,096"] = found
        print(f"mean row of all layers: throughput {found}", flush=True)
        reports.save(report, options.out)
        del off, on
        gc.collect()
    return report


def client_lens(results: dict[str, Any], norm: Any, head: Any, top: int) -> list[Any]:
    """The lens of every layer as computed by a client from rows in a response."""
    import numpy as np
    import torch

    found = []
    for tap in results["inline"]["payload"]:
        data = np.frombuffer(base64.b64decode(tap["data"]), dtype=np.float32)
        rows = torch.from_numpy(data.copy()).reshape(tap["shape"])
        logs = head(norm(rows)).log_softmax(dim=-1)
        found.append(logs.topk(top, dim=-1))
    return found


def on_cpu(options: argparse.Namespace) -> dict[str, Any]:
    """One server that answers both kinds of requests in turns."""
    import torch
    import transformers

    from benchmarks.harness.models import random_llama, random_prompts
    from tests.support.server import OWN_WORKER, Server

    work = ROOT / "build" / "benchmarks"
    model = random_llama(work / "models", options.layers, options.width)
    inner = transformers.AutoModelForCausalLM.from_pretrained(model.folder).float()
    report: dict[str, Any] = {"kind": "readouts-cpu", **reports.begun()}
    report["machine"] = reports.machine(os.getloadavg())
    arguments = ["--enable-readouts", "--capture-consumers", "inline"]
    arguments += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
    arguments += ["--gpu-memory-utilization", "0.2"]  # Of the machine's memory.
    server = Server(model.folder, *arguments, "--served-model-name", "m", **OWN_WORKER)
    prompts = random_prompts(options.requests, options.prompt, options.prompt)
    base = {"model": "m", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    lens = {"kind": "lens", "top_k": 5, "positions": "all"}
    rows = {"hooks": {"post_block": "all"}, "positions": "all"}
    times: dict[str, list[float]] = {"plain": [], "readout": [], "client": []}
    try:
        for _ in range(options.rounds + 1):
            for how in times:
                began = time.perf_counter()
                for prompt in prompts:
                    body = base | {"prompt": prompt}
                    if how == "readout":
                        body |= {"readouts": {"lens": lens}}
                    elif how == "client":
                        body |= {"capture": {"inline": rows}, "capture_wait": True}
                    reply = server.post("/v1/completions", body)
                    assert reply.status == 200, reply
                    if how == "client":
                        with torch.no_grad():
                            own = client_lens(
                                reply.body["capture_results"],
                                inner.model.norm,
                                inner.lm_head,
                                5,
                            )
                    elif how == "readout":
                        answer = reply.body["readouts"]["lens"]
                times[how].append(time.perf_counter() - began)
            found = torch.tensor(answer["logprobs"])
            gap = (found - torch.stack([one.values for one in own], 1)).abs().max()
            print(f"largest difference of log-probabilities {gap.item():.2g}; ", end="")
            print({how: round(one[-1], 3) for how, one in times.items()}, flush=True)
    finally:
        server.close()
    kept = {how: one[1:] for how, one in times.items()}  # The first warms up.
    pairs = zip(kept["client"], kept["readout"])
    report["client_over_readout"] = reports.summary([a / b for a, b in pairs])
    extra = zip(kept["client"], kept["readout"], kept["plain"])
    report["beyond_generation"] = reports.summary(
        [(a - c) / max(b - c, 1e-9) for a, b, c in extra]
    )
    report["seconds"] = {how: statistics.median(one) for how, one in kept.items()}
    print(report["client_over_readout"], report["seconds"], flush=True)
    reports.save(report, options.out)
    return report


def main() -> None:
    """Measure, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=128)
    default = ROOT / "build" / "benchmarks" / "readouts.json"
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args()
    (on_cpu if options.cpu else on_gpu)(options)


if __name__ == "__main__":
    main()
