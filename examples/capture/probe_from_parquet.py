# SPDX-License-Identifier: Apache-2.0
"""Train a linear probe on Parquet files: does the model know a story's tone?

python examples/capture/probe_from_parquet.py

  layer 0   0.75 of 60 unseen stories
  ...
"""

import sys
import tempfile
from itertools import islice

import pyarrow.dataset as ds
import torch
from small import DEMO, DEMO_MODEL, small_engine

from vllm import LLM, SamplingParams
from vllm.v1.capture.consumers.arrow import rows_of

sys.path.insert(0, str(DEMO))
from generate_text import documents


def accuracy(rows: torch.Tensor, labels: torch.Tensor, train: int) -> float:
    """Accuracy on the rows after the first `train`, to which the probe is fitted."""
    mean, std = rows[:train].mean(dim=0), rows[:train].std(dim=0) + 1e-6
    rows = torch.cat([(rows - mean) / std, torch.ones(len(rows), 1)], dim=1)
    known = rows[:train]
    ridge = known.T @ known + 10.0 * torch.eye(known.shape[1])
    weights = torch.linalg.solve(ridge, known.T @ labels[:train])
    return ((rows[train:] @ weights > 0) == (labels[train:] > 0)).float().mean().item()


def show(llm: LLM, folder: str, count: int = 240) -> None:
    """Capture stories, read the Parquet files, and fit and test a probe per layer."""
    stories = list(islice(documents(seed=5), count))
    capture = {"arrow": {"hooks": {"post_block": "all"}}}
    params = SamplingParams(max_tokens=1, capture=capture)
    texts = [story.text[: len(story.text) // 2] for story in stories]
    outputs = llm.generate(texts, params)
    tones = sorted({str(story.tone) for story in stories})
    sign = [2.0 * tones.index(str(story.tone)) - 1 for story in stories]
    label = {output.request_id: value for output, value in zip(outputs, sign)}
    table = ds.dataset(folder).to_table()
    for layer in sorted(set(table["layer"].to_pylist())):
        rows = table.filter(ds.field("layer") == layer)
        values = rows_of(rows).float()
        labels = torch.tensor([label[name] for name in rows["request_id"].to_pylist()])
        share = accuracy(values, labels, train=count * 3 // 4)
        print(f"layer {layer:<3} {share:.2f} of {count // 4} unseen stories")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as root:
        show(small_engine(DEMO_MODEL, f"arrow:root={root}"), root)
