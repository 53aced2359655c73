# SPDX-License-Identifier: Apache-2.0
"""Other tools read the tables of `vllm capture`, with readouts."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("polars", reason="make test-interop")

import datasets
import duckdb
import numpy as np
import pandas
import polars
import torch

from tests.capture_dataset._collecting import WIDTH, collected, write_source
from tests.capture_dataset.test_readouts import SPECS, ReadingRunner
from vllm.capture_dataset import CaptureDataset, load_dataset

pytestmark = pytest.mark.interop

LAYER = 3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> CaptureDataset:
    folder = tmp_path_factory.mktemp("captured")
    source = write_source(folder)
    collected(source, folder / "out", ReadingRunner(), readouts=SPECS)
    return load_dataset(folder / "out")


@pytest.fixture(scope="module")
def files(data: CaptureDataset) -> str:
    return str(data.folder / "*.parquet")


def test_polars(data: CaptureDataset, files: str) -> None:
    frame = (
        polars.scan_parquet(files)
        .filter(polars.col("layer") == LAYER)
        .sort("sample", "position")
        .select("sample", "label", "token", "values", "size.norm", "lens.token_ids")
        .collect()
    )
    view = data.layer(LAYER)
    assert frame["values"].dtype == polars.Array(polars.Float32, WIDTH)
    assert (frame["values"].to_numpy() == view.to_numpy()).all()
    assert (frame["size.norm"].to_numpy() == view.readout("size.norm")).all()
    assert (frame["lens.token_ids"].to_numpy() == view.readout("lens.token_ids")).all()
    assert frame["label"].to_list() == [s % 2 for s in frame["sample"].to_list()]


def test_duckdb(data: CaptureDataset, files: str) -> None:
    found = duckdb.sql(
        f"select values, \"size.norm\", token from '{files}' where layer = {LAYER} "
        "order by sample, position"
    ).fetchall()
    view = data.layer(LAYER)
    assert [list(line[0]) for line in found] == view.to_numpy().tolist()
    assert [line[1] for line in found] == view.readout("size.norm").tolist()
    assert [line[2] for line in found] == data.columns.column("token").to_pylist()


def test_pandas(data: CaptureDataset) -> None:
    frame = pandas.concat(map(pandas.read_parquet, data.folder.glob("*.parquet")))
    frame = frame[frame.layer == LAYER].sort_values(["sample", "position"])
    assert (np.stack(frame["values"]) == data.layer(LAYER).to_numpy()).all()
    means = frame.groupby("prompt_id")["size.norm"].mean()
    assert len(means) == len(data) and means.notna().all()
    whole = frame["mean.rows"].dropna()
    assert len(whole) == len(data)


def test_datasets(data: CaptureDataset, files: str, tmp_path: Path) -> None:
    opened = datasets.load_dataset(
        "parquet", data_files=files, split="train", cache_dir=str(tmp_path)
    )
    assert opened.features["values"].length == WIDTH
    one = opened.filter(lambda line: line["layer"] == LAYER).sort("sample")
    rows = one.with_format("torch")["values"][:]
    assert rows.shape == (len(data.columns), WIDTH)
    ours = data.layer(LAYER).to_torch()
    assert torch.equal(rows.sum(dim=0), ours.sum(dim=0)) or torch.allclose(
        rows.double().sum(dim=0), ours.double().sum(dim=0)
    )


def test_torch(data: CaptureDataset) -> None:
    view: Any = data.layer(LAYER)
    loader: Any = torch.utils.data.DataLoader(view, batch_size=5, collate_fn=torch.cat)
    assert torch.equal(torch.cat(list(loader)), view.to_torch())
