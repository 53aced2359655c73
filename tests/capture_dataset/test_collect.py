# SPDX-License-Identifier: Apache-2.0
"""A data set holds each row once, however the runs that collect it end."""

import json
import pickle
import random
import re
from argparse import ArgumentTypeError
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from tests.capture_dataset._collecting import (
    LAYERS,
    WIDTH,
    FakeRunner,
    collected,
    contents,
    planned,
    row,
    write_source,
)
from vllm.capture_dataset import load_dataset
from vllm.capture_dataset.collect import begin, collect
from vllm.capture_dataset.formats import WRITERS
from vllm.capture_dataset.manifest import Manifest
from vllm.capture_dataset.progress import Progress, parse_bytes
from vllm.capture_dataset.prompts import Prompt, TokenText
from vllm.capture_dataset.shards import MAX_PROMPTS, groups
from vllm.capture_dataset.survey import Entry
from vllm.capture_dataset.table import Captured
from vllm.v1.capture.errors import CaptureValidationError

READABLE = [name for name in WRITERS if name != "saelens"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path)


def test_the_table_has_every_row_with_what_is_beside_it(
    source: Path, tmp_path: Path
) -> None:
    manifest = collected(source, tmp_path / "out")
    files = sorted((tmp_path / "out").glob("*.parquet"))
    assert manifest.complete and 3 < len(files) == len(manifest.shards)
    lines = [line for file in files for line in pq.read_table(file).to_pylist()]
    texts = [json.loads(line) for line in source.read_text().splitlines()]
    seen = set()
    for line in lines:
        where = line["sample"], line["layer"], line["position"]
        seen.add(where)
        told = texts[line["sample"]]
        assert line["prompt_id"] == told["name"] and line["label"] == told["label"]
        assert line["hook"] == "post_block"
        wanted = row(line["sample"], line["position"], line["token_id"], line["layer"])
        assert line["values"] == torch.tensor(wanted).tolist()
        if line["is_prompt"] and line["position"]:
            start = line["text_offset"]
            assert told["text"][start : start + len(line["token"])] == line["token"]
        if not line["is_prompt"]:
            assert line["text_offset"] >= len(told["text"])
    assert len(seen) == len(lines) == sum(shard.num_rows for shard in manifest.shards)
    assert {line["sample"] for line in lines} == set(range(23))


def test_within_a_file_rows_are_sorted_by_layer_sample_and_position(
    source: Path, tmp_path: Path
) -> None:
    collected(source, tmp_path / "out")
    for file in (tmp_path / "out").glob("*.parquet"):
        keys = ["layer", "sample", "position"]
        lines = [
            tuple(x.values()) for x in pq.read_table(file, columns=keys).to_pylist()
        ]
        assert lines == sorted(lines)


@pytest.mark.parametrize("format", WRITERS)
def test_runs_that_are_ended_anywhere_make_the_files_of_one_that_is_not(
    source: Path, tmp_path: Path, format: str
) -> None:
    chosen: dict[str, Any] = {"format": format, "context_size": 4}
    collected(source, tmp_path / "whole", **chosen)
    chance, runs = random.Random(format), 0
    while runs == 0 or not Manifest.read(tmp_path / "parts").complete:
        runner = FakeRunner(fail_after=chance.randint(1, 6))
        try:
            collected(source, tmp_path / "parts", runner, resume=runs > 0, **chosen)
        except KeyboardInterrupt:
            whole = contents(tmp_path / "parts")
            for shard in Manifest.read(tmp_path / "parts").shards:
                assert shard.files.keys() <= whole.keys(), "not all is readable"
        runs += 1
        # Files that a killed writer has left are removed.
        (tmp_path / "parts/.incomplete").mkdir(exist_ok=True)
        (tmp_path / "parts/.incomplete/part-00099").write_bytes(b"half")
    collected(source, tmp_path / "parts", resume=True, **chosen)
    assert runs > 3
    found = contents(tmp_path / "parts")
    found.pop(".incomplete/part-00099", None)
    assert found == contents(tmp_path / "whole")


@pytest.mark.parametrize("format", READABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_format_gives_the_rows_back(
    source: Path, tmp_path: Path, format: str, dtype: torch.dtype
) -> None:
    collected(source, tmp_path / "out", FakeRunner(dtype), format=format)
    data = load_dataset(tmp_path / "out")
    assert len(data) == 23 and data.taps == [(layer, "post_block") for layer in LAYERS]
    samples = data.samples.to_pylist()
    assert [one["prompt_id"] for one in samples] == [f"p-{i}" for i in range(23)]
    assert [one["label"] for one in samples] == [i % 2 for i in range(23)]
    ids = data.columns.column("token_id").to_pylist()
    for layer in LAYERS:
        view, done = data.layer(layer), 0
        for number in range(len(view)):
            rows = view[number]
            assert len(rows) == samples[number]["num_rows"]
            wanted = [
                row(number, position, ids[done + index], layer)
                for index, position in enumerate(view.positions(number))
            ]
            assert torch.equal(rows.float(), torch.tensor(wanted).to(dtype).float())
            done += len(rows)
        assert view.to_torch().shape == (done, WIDTH) == view.to_numpy().shape
    data.verify()


def test_views_are_padded_and_statistics_are_over_everything(
    source: Path, tmp_path: Path
) -> None:
    collected(source, tmp_path / "out")
    data = load_dataset(tmp_path / "out")
    view = data.layer(3)
    rows, mask = view.padded([0, 2])
    assert rows.shape == (2, len(view[2]), WIDTH) and view.shape[0] == 23
    assert mask.sum(dim=1).tolist() == [len(view[0]), len(view[2])]
    assert torch.equal(rows[0][mask[0]], view[0]) and not rows[0][~mask[0]].any()
    assert torch.equal(view[0:3][2], view[2]) and torch.equal(view[-1], view[22])
    everything = view.to_torch()
    found = view.statistics()
    assert found.num_rows == len(everything)
    assert torch.allclose(found.mean.float(), everything.mean(dim=0), rtol=1e-4)
    assert torch.allclose(view.means()[5], view[5].mean(dim=0), rtol=1e-4)
    ids, cosines = data.sample_cosines(3)
    assert len(ids) == 23 and cosines.shape == (23, 23)
    wanted = torch.nn.functional.cosine_similarity(view.means()[4], view.means()[7], 0)
    assert float(cosines[4, 7]) == pytest.approx(float(wanted), abs=1e-5)
    layers, alike = data.layer_cosines()
    pair = torch.nn.functional.cosine_similarity(
        data.layer(1).to_torch(), everything, dim=1
    )
    assert layers == [1, 3]
    assert float(alike[0, 1]) == pytest.approx(float(pair.mean()), abs=1e-5)
    with pytest.raises(KeyError, match="layer 2"):
        data.layer(2)


class Keeping(FakeRunner):
    """Keeps no rows of every third prompt."""

    def run(self, *arguments: Any) -> Iterator[Captured]:
        for item in super().run(*arguments):
            if item.prompt.entry.sample % 3:
                yield item
                continue
            rows = {tap: values[:0] for tap, values in item.rows.items()}
            yield replace(item, rows=rows, positions=[])


def test_samples_without_rows_have_no_place_in_a_view(
    source: Path, tmp_path: Path
) -> None:
    collected(source, tmp_path / "out", Keeping())
    data = load_dataset(tmp_path / "out")
    kept = [number for number in range(23) if number % 3]
    assert data.samples.column("sample").to_pylist() == kept
    view = data.layer(3)
    assert len(data) == len(view) == view.shape[0] == len(kept)
    assert [int(view[i][0, 0]) for i in range(len(view))] == kept
    assert view.means()[:, 0].tolist() == kept
    ids, cosines = data.sample_cosines(3)
    assert cosines.shape == (len(ids), len(kept)) and len(ids) == len(kept)


def test_a_view_takes_what_arrays_take_and_goes_to_other_processes(
    source: Path, tmp_path: Path
) -> None:
    collected(source, tmp_path / "out")
    view = load_dataset(tmp_path / "out").layer(3)
    for index in (np.int64(4), torch.tensor(4), np.arange(23)[4]):
        assert torch.equal(view[index], view[4])
    mask = np.arange(23) % 5 == 2
    assert torch.equal(view[mask], view[[2, 7, 12, 17, 22]])
    assert torch.equal(view[torch.tensor(mask)], view[mask])
    assert view[mask[:0].astype(int)].shape == (0, 0, WIDTH)
    with pytest.raises(IndexError, match="mask.*of 23 samples"):
        view[mask[:5]]
    same = pickle.loads(pickle.dumps(view))
    assert torch.equal(same.to_torch(), view.to_torch()) and len(same) == 23


def test_a_token_id_that_the_model_lacks_is_refused_before_anything_runs(
    tmp_path: Path,
) -> None:
    path, runner = tmp_path / "in.jsonl", FakeRunner()
    path.write_text('{"name": 1, "label": 1, "prompt": [5, 1300]}\n')
    runner.model = replace(runner.model, last_token=1279)
    with pytest.raises(CaptureValidationError, match="line 1 .* id 1300.* to 1279"):
        planned(path, tmp_path / "out", runner)


def test_a_folder_of_another_data_set_is_refused(source: Path, tmp_path: Path) -> None:
    collected(source, tmp_path / "out", limit=4)
    runner = FakeRunner()

    def again(**chosen: Any) -> None:
        begin(planned(source, tmp_path / "out", runner, **{"limit": 4, **chosen}))

    with pytest.raises(
        CaptureValidationError, match="holds a data set already.*--resume"
    ):
        again()
    for name, value in {"max_tokens": 2, "limit": 5, "format": "safetensors"}.items():
        with pytest.raises(CaptureValidationError, match=f"begun with {name}"):
            again(resume=True, **{name: value})
    write_source(tmp_path, 24)
    with pytest.raises(CaptureValidationError, match="source_sha256"):
        again(resume=True)
    assert runner.ran == []


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("7", 7), ("64K", 65536), ("64k", 64000), ("20MB", 20_000_000)),
        *(("1GiB", 1 << 30), ("1.5 GiB", 3 << 29), ("2mb", 2_000_000)),
    ],
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_what_is_no_size_is_refused() -> None:
    for text in ("", "MB", "-1M", "1 PB", "12 apples"):
        with pytest.raises(ArgumentTypeError, match="is not a size"):
            parse_bytes(text)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"layers": (9,)}, "layer 9.*has no hook point"),
        ({"hooks": ("mlp_in",)}, "'mlp_in'"),
        ({"hooks": ("post_block", "q")}, "rows of q have"),
        ({"max_tokens": 60}, "line 1 has . tokens.*takes 4.*--truncate 4"),
        ({"positions": [0, 30]}, "30 is outside of line 1"),
        ({"positions": [-30]}, "-30 is outside of line 1"),
        ({"positions": {"ranges": [[0, 30]]}}, "30 is outside of line 1"),
        ({"positions": "al"}, "positions must"),
    ],
)
def test_what_the_model_cannot_do_is_refused_before_anything_runs(
    source: Path, tmp_path: Path, chosen: dict[str, Any], said: str
) -> None:
    runner = FakeRunner()
    with pytest.raises(CaptureValidationError, match=said):
        planned(source, tmp_path / "out", runner, **chosen)
    assert runner.ran == [] and not (tmp_path / "out").exists()


def test_float16_refuses_values_out_of_its_range(source: Path, tmp_path: Path) -> None:
    class Loud(FakeRunner):
        def run(self, *arguments: Any) -> Any:
            for item in super().run(*arguments):
                item.rows[3, "post_block"][0, 0] = 1e6
                yield item

    with pytest.raises(ValueError, match="range of float16.*--values-dtype float32"):
        collected(source, tmp_path / "out", Loud(), values_dtype="float16")


def test_truncated_prompts_keep_their_first_tokens(
    source: Path, tmp_path: Path
) -> None:
    collected(source, tmp_path / "out", truncate=2, positions="all_prompt")
    assert load_dataset(tmp_path / "out").layer(1).shape == (23, 2, WIDTH)


def test_saelens_finds_contexts_under_its_names(source: Path, tmp_path: Path) -> None:
    import datasets

    collected(source, tmp_path / "out", format="saelens", context_size=4)
    opened = datasets.load_from_disk(str(tmp_path / "out"))
    assert opened.features["blocks.3.hook_resid_post"].shape == (4, WIDTH)
    opened.set_format("torch", columns=["blocks.3.hook_resid_post", "token_ids"])
    first = opened[0]
    assert first["blocks.3.hook_resid_post"].shape == (4, WIDTH)
    assert torch.equal(
        first["blocks.3.hook_resid_post"][:, 2], first["token_ids"].float()
    )


def test_shards_of_few_rows_have_not_endless_prompts() -> None:
    entry = Entry(0, "0", "a", (), "line 1")
    prompt = Prompt(entry, [1], TokenText(["a"], [0]), 1)
    made = groups([prompt] * (2 * MAX_PROMPTS + 1), lambda _: 1, 1 << 40)
    assert [len(group) for group in made] == [MAX_PROMPTS, MAX_PROMPTS, 1]


def test_progress_moves_within_a_shard(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    class Seen(Progress):
        def done(self, *counts: int) -> None:
            super().done(*counts)
            seen.append((self.num_rows, len(list(tmp_path.glob("out/*.parquet")))))

    runner = FakeRunner()
    plan = planned(source, tmp_path / "out", runner, shard_bytes=1 << 20)
    collect(plan, runner, Seen(23, disable=True))  # type: ignore[arg-type]
    assert len(seen) == 23 and {files for _, files in seen} == {0}
    assert [rows for rows, _ in seen] == sorted({rows for rows, _ in seen})
    assert len(list(tmp_path.glob("out/*.parquet"))) == 1


def test_a_log_has_whole_lines_of_progress(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(3)
    progress.skipped(1)
    for _ in range(2):
        progress.done(num_tokens=64, num_rows=128, num_bytes=1 << 20)
    progress.close()
    told = capsys.readouterr().err
    assert "\r" not in told
    last = told.splitlines()[-1]
    assert "3/3" in last and "256 rows, 2 MiB" in last and "tokens/s" in last
    assert re.search(r"\[\d+:\d+<[\d?]+(:\d+)?, .*prompts", last), "time left, speed"
