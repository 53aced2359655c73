# SPDX-License-Identifier: Apache-2.0
"""SAELens' store reads a data set of `vllm capture --format saelens`."""

from pathlib import Path

import pytest

pytest.importorskip("sae_lens", reason="make test-interop")

import torch
from datasets import Dataset, load_from_disk
from sae_lens.training.activations_store import ActivationsStore

from tests.capture_dataset._collecting import WIDTH, collected, row, write_source

pytestmark = pytest.mark.interop

SIZE = 4
HOOK = "blocks.3.hook_resid_post"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("captured")
    chosen = {"format": "saelens", "context_size": SIZE}
    collected(write_source(folder), folder / "out", **chosen)
    return folder / "out"


def test_its_store_gives_the_rows_that_were_captured(folder: Path) -> None:
    kept = load_from_disk(str(folder)).with_format("torch")
    assert kept.features[HOOK].shape == (SIZE, WIDTH) and len(kept) > 10
    wanted = {tuple(row_of.tolist()) for context in kept[HOOK][:] for row_of in context}
    store = ActivationsStore(
        model=None,
        dataset=Dataset.from_dict({"text": ["unused"]}),
        streaming=False,
        hook_name=HOOK,
        hook_head_index=None,
        context_size=SIZE,
        d_in=WIDTH,
        n_batches_in_buffer=2,
        total_training_tokens=64,
        store_batch_size_prompts=2,
        train_batch_size_tokens=8,
        prepend_bos=False,
        normalize_activations="none",
        device=torch.device("cpu"),
        dtype="float32",
        cached_activations_path=str(folder),
    )
    batch = next(iter(store))
    rows = batch.reshape(-1, WIDTH)
    assert rows.shape == (8, WIDTH)
    assert {tuple(one.tolist()) for one in rows} <= wanted
    # Each row encodes its prompt and token.
    sample, position, token, layer = (int(value) for value in rows[0, :4])
    assert layer == 3
    assert rows[0].tolist() == torch.tensor(row(sample, position, token, 3)).tolist()
