# SPDX-License-Identifier: Apache-2.0
"""Data sets collected from a fake model, whose rows are a function of their token."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from vllm.capture_dataset.collect import collect
from vllm.capture_dataset.manifest import NAME, Manifest
from vllm.capture_dataset.plan import Plan
from vllm.capture_dataset.progress import Progress
from vllm.capture_dataset.prompts import Prompt, Tokens
from vllm.capture_dataset.runners import Runner
from vllm.capture_dataset.spec import ModelFacts, OutputSpec, RowsSpec, SourceSpec
from vllm.capture_dataset.survey import Survey
from vllm.capture_dataset.table import Captured

ROOT = Path(__file__).parents[2]
WIDTH = 8
LAYERS = (1, 3)


def row(sample: int, position: int, token: int, layer: int) -> list[float]:
    return [sample, position, token, layer, 0.5, -1.0, token / 3, 1e-3 * position]


class FakeRunner:
    """Computes rows by arithmetic; can fail after a number of prompts."""

    def __init__(
        self, dtype: torch.dtype = torch.float32, fail_after: int = -1
    ) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(
            ROOT / "examples/demo_model/weights"
        )
        self.dtype = dtype
        self.fail_after = fail_after
        self.ran: list[int] = []
        self.model = ModelFacts(
            name="fake",
            architecture="Fake",
            weights="0",
            tokenizer="",
            num_layers=4,
            hidden_size=WIDTH,
            max_model_len=64,
            dtype=str(dtype).removeprefix("torch."),
            hook_points={layer: ("pre_attn", "post_block", "q") for layer in range(4)},
            other_widths={f"q.{layer}": 2 * WIDTH for layer in range(4)},
        )

    def run(
        self, prompts: Sequence[Prompt], rows: RowsSpec, tokens: Tokens
    ) -> Iterator[Captured]:
        for prompt in reversed(prompts):  # Results arrive in any order.
            if len(self.ran) == self.fail_after:
                raise KeyboardInterrupt
            self.ran.append(prompt.entry.sample)
            generated = list(range(20, 20 + rows.max_tokens))
            ids = prompt.token_ids + generated
            positions = list(range(len(ids) - 1))
            if rows.positions == "last_prompt":
                positions = [len(prompt.token_ids) - 1]
            elif rows.positions == "all_prompt":
                positions = positions[: len(prompt.token_ids)]
            values = {
                (layer, hook): torch.tensor(
                    [row(prompt.entry.sample, p, ids[p], layer) for p in positions]
                ).to(self.dtype)
                for layer, hook in rows.taps
            }
            text = tokens.continued(prompt, generated)
            yield Captured(prompt, values, positions, ids, text)

    def readout_modules(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


def write_source(folder: Path, count: int = 23) -> Path:
    path = folder / "prompts.jsonl"
    lines = [
        {
            "name": f"p-{i}",
            "text": "Anna went home. " * (1 + i % 3),
            "label": i % 2,
            "tags": ["a", "b"][: i % 3],
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def planned(source: Path, out: Path, runner: Runner, **chosen: Any) -> Plan:
    def of(kind: Any, **default: Any) -> Any:
        names = kind.__dataclass_fields__
        return kind(**default | {n: v for n, v in chosen.items() if n in names})

    return Plan.of(
        Survey.of(of(SourceSpec, path=source, id_column="name", carry=("label",))),
        of(RowsSpec, layers=LAYERS, positions="all", max_tokens=3),
        of(OutputSpec, folder=out, shard_bytes=1600),
        runner,
    )


def collected(
    source: Path, out: Path, runner: Runner | None = None, **chosen: Any
) -> Manifest:
    runner = runner or FakeRunner()
    plan = planned(source, out, runner, **chosen)
    return collect(plan, runner, Progress(1, disable=True))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but the manifest, byte for byte."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != NAME
    }
