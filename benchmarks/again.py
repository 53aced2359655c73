# SPDX-License-Identifier: Apache-2.0
"""Claim: rows of a prompt that was captured before cost no forward pass.

    python benchmarks/again.py [--model 8b] [--rounds 5] [--out again.json]

One engine with an activation store captures prompts of 2,048 tokens at all positions
for the caller, at one layer, at eight, and at all: `new` prompts, whose rows are
stored; the same prompts `again`; and `computed` again, with `capture_cache=False`,
which is what an engine without a store does. One prompt alone, and eight together, in
turns half a second apart. The store is full after two rounds; the first three are not
counted. `--model tiny --eager` runs without a GPU.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # At the end, as the checkout has a folder `vllm` too.

from benchmarks.harness import reports  # noqa: E402
from benchmarks.harness.llamas import MODELS, describe, model_folder  # noqa: E402

PROMPT, WARM, PAUSE = 2048, 3, 0.5


def main() -> None:
    """Parse options, run, report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("again.json"))
    options = parser.parse_args()
    import torch

    from vllm import LLM, SamplingParams

    llm = LLM(
        model_folder(options.model),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=PROMPT + 16,
        enforce_eager=options.eager,
        capture_consumers=["inline:max_inflight_bytes=17179869184"],
        activation_store_gb=12,
    )
    layers = MODELS[options.model]["num_hidden_layers"]
    draw = torch.Generator().manual_seed(0)

    def turn(prompts: list[list[int]], chosen: Any, cache: bool) -> tuple[float, Any]:
        spec = {"hooks": {"post_block": chosen}, "positions": "all_prompt"}
        params = SamplingParams(
            max_tokens=1,
            detokenize=False,
            capture={"inline": spec},
            capture_cache=cache,
        )
        given = [{"prompt_token_ids": ids} for ids in prompts]
        time.sleep(PAUSE)
        began = time.perf_counter()
        outputs = llm.generate(given, params, use_tqdm=False)  # type: ignore[arg-type]
        seconds = time.perf_counter() - began
        results = [(one.capture_results or {})["inline"] for one in outputs]
        assert all(one.status == "ok" for one in results)
        return seconds, results[0].payload[layers // 2, "post_block"]

    turns: dict[str, list[dict[str, float]]] = {}
    for _ in range(WARM + options.rounds):
        for chosen in ([layers // 2], list(range(0, layers, layers // 8 or 1)), "all"):
            for many in (1, 8):
                prompts = torch.randint(1000, 30000, (many, PROMPT), generator=draw)
                times, rows = {}, {}
                for mode in ("new", "again", "computed"):
                    asked = prompts.tolist(), chosen, mode != "computed"
                    times[mode], rows[mode] = turn(*asked)
                same = rows["new"][: PROMPT - 16], rows["again"][: PROMPT - 16]
                assert torch.equal(*same), "stored rows are not those of the first time"
                name = f"{many} at {'all' if chosen == 'all' else len(chosen)} layers"
                turns.setdefault(name, []).append(times)
                print(name, {k: round(s, 4) for k, s in times.items()}, flush=True)
    medians = {
        name: {key: median(one[key] for one in each[WARM:]) for key in each[0]}
        for name, each in turns.items()
    }
    for name, found in medians.items():
        new, again = (found[key] / found["computed"] for key in ("new", "again"))
        print(f"{name}: new {new:.3f}, again {again:.3f} of the time to compute")
    about = reports.begun() | {"gpu": reports.ask_gpu("name")}
    about |= {"model": describe(options.model), "medians": medians, "turns": turns}
    reports.write(about, options.out)


if __name__ == "__main__":
    main()
