# SPDX-License-Identifier: Apache-2.0
"""Readouts are stored as columns next to their rows."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.capture_dataset._collecting import (
    LAYERS,
    WIDTH,
    FakeRunner,
    collected,
    contents,
    planned,
    write_source,
)
from vllm.capture_dataset import load_dataset
from vllm.capture_dataset.prompts import Prompt, Tokens
from vllm.capture_dataset.readouts import parse_readouts
from vllm.capture_dataset.spec import RowsSpec
from vllm.capture_dataset.table import Captured
from vllm.v1.capture.errors import CaptureValidationError
from vllm.v1.readouts.results import ReadoutResult

SPECS: dict[str, Any] = {
    "lens": {"kind": "lens", "top_k": 2},
    "risk": {"kind": "probe", "probe": "risk"},
    "size": {"kind": "norm"},
    "mean": {"kind": "rows", "reduce": "mean"},
}
FORMATS = ("parquet", "safetensors")


class ReadingRunner(FakeRunner):
    """A runner that computes readouts by arithmetic too."""

    error: str | None = None

    def readout_modules(self) -> dict[str, Any]:
        return {"risk": {"kind": "probe", "width": WIDTH}, "other": {}}

    def run(
        self, prompts: Sequence[Prompt], rows: RowsSpec, tokens: Tokens
    ) -> Iterator[Captured]:
        for item in super().run(prompts, rows, tokens):
            found = {name: self.result(name, rows, item) for name in rows.readouts}
            yield replace(item, readouts=found)

    def result(self, name: str, rows: RowsSpec, item: Captured) -> ReadoutResult:
        spec = rows.readouts[name]
        at = np.array(item.positions)
        by_tap = {
            "lens": [(layer, "post_block") for layer in spec.get("layers", ())],
            "norm": [(1, "post_block"), (3, "post_block")],
            "rows": [(3, "post_block")],
        }
        taps = by_tap.get(spec["kind"], [(2, "post_block")])
        sample = item.prompt.entry.sample
        grid = sample * 1000 + at[:, None] * 10 + np.array([t[0] for t in taps])
        arrays = {
            "lens": {
                "token_ids": np.stack([grid, grid + 1], -1).astype(np.int32),
                "logprobs": np.stack([-grid, -grid - 1], -1).astype(np.float32),
            },
            "norm": {"norm": grid.astype(np.float32)},
            "rows": {"rows": np.full((1, WIDTH), sample, np.float32)},
            "probe": {"values": np.stack([at, at * 2.0], -1).astype(np.float32)},
        }[spec["kind"]]
        return ReadoutResult(
            spec["kind"], item.positions, tuple(taps), arrays, self.error
        )


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_has_what_was_read_out_beside_its_row(
    tmp_path: Path, format: str
) -> None:
    chosen = {"readouts": SPECS, "format": format}
    collected(write_source(tmp_path), tmp_path / "out", ReadingRunner(), **chosen)
    data = load_dataset(tmp_path / "out")
    assert set(data.readouts) == {
        *("lens.token_ids", "lens.logprobs", "risk.values", "size.norm", "mean.rows")
    }
    sample, at = (data.columns.column(n).to_numpy() for n in ("sample", "position"))
    for layer in LAYERS:
        view = data.layer(layer)
        wanted = sample * 1000 + at * 10 + layer
        assert (view.readout("size.norm") == wanted).all()
        ids, odds = view.readout("lens.token_ids"), view.readout("lens.logprobs")
        assert (ids == np.stack([wanted, wanted + 1], -1)).all()
        assert (ids == -odds).all() and ids.dtype == np.int32
        assert (view.readout("risk.values") == np.stack([at, at * 2], -1)).all()
    means = data.layer(3).readout("mean.rows")
    last = np.append(np.diff(sample) > 0, True)
    assert means.shape == (len(sample), WIDTH) and np.isnan(means[~last]).all()
    assert (means[last] == np.arange(23)[:, None]).all()
    with pytest.raises(KeyError, match="read out at"):
        data.layer(1).readout("mean.rows")
    with pytest.raises(KeyError, match="lens.logprobs"):
        data.layer(1).readout("lens")
    data.verify()


def test_the_table_has_a_column_per_array(tmp_path: Path) -> None:
    source = write_source(tmp_path)
    collected(source, tmp_path / "out", ReadingRunner(), readouts=SPECS)
    (first, *_) = sorted((tmp_path / "out").glob("*.parquet"))
    table = pq.read_table(first)
    assert str(table.schema.field("lens.token_ids").type).startswith("fixed_size_list")
    for line in table.to_pylist():
        told = line["sample"] * 1000 + line["position"] * 10 + line["layer"]
        assert line["size.norm"] == told and line["lens.token_ids"] == [told, told + 1]
        assert line["layer"] == 3 or line["mean.rows"] is None
    facts = load_dataset(tmp_path / "out").facts["readouts"]
    assert facts["modules"] == {"risk": {"kind": "probe", "width": WIDTH}}
    assert facts["specs"]["lens"]["layers"] == list(LAYERS)


def test_a_resumed_run_has_the_readouts_of_a_whole_one(tmp_path: Path) -> None:
    source = write_source(tmp_path)
    collected(source, tmp_path / "whole", ReadingRunner(), readouts=SPECS)
    with pytest.raises(KeyboardInterrupt):
        runner = ReadingRunner(fail_after=9)
        collected(source, tmp_path / "parts", runner, readouts=SPECS)
    with pytest.raises(CaptureValidationError, match="begun with readouts"):
        chosen = {"resume": True, "readouts": {"lens": {"kind": "lens"}}}
        collected(source, tmp_path / "parts", ReadingRunner(), **chosen)
    chosen = {"resume": True, "readouts": SPECS}
    collected(source, tmp_path / "parts", ReadingRunner(), **chosen)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["lens", "lens={}"], "'lens' is given twice"),
        (['x={"kind'], "is not NAME=JSON"),
        (["x=5"], "must be a kind, or NAME"),
    ],
)
def test_options_that_make_no_sense_are_refused(given: list[str], said: str) -> None:
    with pytest.raises(CaptureValidationError, match=said):
        parse_readouts(given)


@pytest.mark.parametrize(
    ("spec", "chosen", "said"),
    [
        ({"kind": "norm", "positions": "last_prompt"}, {}, "to which its results"),
        ({"kind": "lens", "layers": [2, 3]}, {}, "post_block of layer 2, whose rows"),
        ({"kind": "norm"}, {"format": "saelens"}, "choose another --format"),
        ({"kind": "norm"}, {"carry": ("r.norm",)}, "'r.norm' is a carried column"),
    ],
)
def test_results_that_have_no_place_are_refused(
    spec: Any, chosen: dict[str, Any], said: str, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "Anna", "name": "a", "r.norm": 1}')
    plain = {"carry": (), "readouts": {"r": spec}} | chosen
    with pytest.raises(CaptureValidationError, match=said):
        planned(source, tmp_path / "out", ReadingRunner(), **plain)
    assert not (tmp_path / "out").exists()


def test_a_readout_that_fails_is_reported(tmp_path: Path) -> None:
    runner = ReadingRunner()
    runner.error = "only 2 of 3 tokens were read out"
    with pytest.raises(CaptureValidationError, match="gave nothing.*only 2 of 3"):
        planned(write_source(tmp_path), tmp_path / "out", runner, readouts=SPECS)
