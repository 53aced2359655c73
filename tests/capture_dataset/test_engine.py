# SPDX-License-Identifier: Apache-2.0
"""`vllm capture` with an engine: the model's rows."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.capture_dataset._collecting import ROOT, collected
from tests.support.hf_reference import Reference, relative_error
from vllm.capture_dataset import load_dataset, runners
from vllm.capture_dataset.manifest import Manifest
from vllm.capture_dataset.runners import EngineRunner

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MODEL = ROOT / "examples/demo_model/weights"
TEXTS = ("Anna went home.", "The old house by the river was cold", "Max was happy and")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    lines = [" ".join(TEXTS[: 1 + i % 3]) + f" {i}." for i in range(60)]
    path.write_text("\n".join(lines))
    return path


CHOSEN: dict[str, Any] = {
    "id_column": None,
    "carry": (),
    "layers": (1, 4),
    "max_tokens": 4,
    "shard_bytes": 200_000,
    "resume": True,
}


def run(runner: EngineRunner, source: Path, out: Path, **rows: Any) -> Any:
    """The data set of all rows of two layers, or of what `rows` says."""
    collected(source, out, runner, **CHOSEN | rows)
    return load_dataset(out)


def test_readouts_are_those_of_the_rows_beside_them(
    runner: EngineRunner, source: Path, tmp_path: Path
) -> None:
    specs = {
        "lens": {"kind": "lens", "top_k": 3},
        "size": {"kind": "norm"},
        "first": {"kind": "probe", "layer": 1, "vectors": [[1.0] + 191 * [0.0]]},
        "mean": {"kind": "rows", "reduce": "mean"},
    }
    data = run(runner, source, tmp_path / "out", readouts=specs)
    model = Reference(MODEL).model
    for layer in (1, 4):
        view, rows = data.layer(layer), data.layer(layer).to_torch()
        sizes = torch.from_numpy(view.readout("size.norm"))
        assert torch.allclose(sizes, rows.norm(dim=-1), rtol=1e-4)
        with torch.no_grad():
            wanted = model.lm_head(model.model.norm(rows)).log_softmax(dim=-1)
        ids = torch.from_numpy(view.readout("lens.token_ids")).long()
        odds = torch.from_numpy(view.readout("lens.logprobs"))
        assert torch.allclose(wanted.gather(1, ids), odds, atol=1e-3)
        firsts = torch.from_numpy(view.readout("first.values"))[:, 0]
        assert torch.allclose(firsts, data.layer(1).to_torch()[:, 0], atol=1e-4)
        means = torch.from_numpy(view.readout("mean.rows"))
        kept = means[~means.isnan().any(dim=-1)]
        assert torch.allclose(kept, view.means(), atol=1e-4)


@pytest.mark.parametrize("window", [{}, {"scope": "token", "before": 1, "after": 2}])
def test_rows_are_stored_where_a_readout_fires(
    runner: EngineRunner, source: Path, tmp_path: Path, window: dict[str, Any]
) -> None:
    # All prompts begin alike: read a number that is largest in some of them only.
    rows = run(runner, source, tmp_path / "rows")
    numbers = rows.layer(1).to_torch()
    owners = torch.tensor(rows.columns.column("sample").to_pylist())
    tops = torch.stack([numbers[owners == n].amax(0) for n in range(60)])
    spread = tops.sort(dim=0).values
    number = int((spread[-6] - spread[-7]).argmax())
    at = float(spread[-7:-5, number].mean())
    axis = torch.eye(192)[number].tolist()
    specs = {
        "first": {"kind": "probe", "layer": 1, "vectors": [axis]},
        "size": {"kind": "norm"},
    }

    def table(folder: Path, **rows: Any) -> dict[tuple[int, int], tuple[Any, ...]]:
        data = run(runner, source, folder, readouts=specs, **rows)
        data.verify()
        view = data.layer(4)
        columns = [data.columns.column(n).to_pylist() for n in ("sample", "position")]
        values = view.readout("first.values")[:, 0].tolist()
        sizes = view.readout("size.norm").tolist()
        return dict(
            zip(zip(*columns), zip(values, sizes, view.to_torch()), strict=True)
        )

    every = table(tmp_path / "all")
    rule = {"readout": "first", "above": at} | window
    kept = table(tmp_path / "kept", keep_when=rule)
    fired = [place for place, (value, *_) in every.items() if value > at]
    before, after = (window.get(name, 1 << 20) for name in ("before", "after"))
    wanted = {
        (sample, position)
        for sample, position in every
        for one, middle in fired
        if sample == one and -before <= position - middle <= after
    }
    assert fired and kept.keys() == wanted < every.keys()
    for place, (value, size, row) in kept.items():
        assert value == pytest.approx(every[place][0], abs=1e-4)
        assert size == pytest.approx(every[place][1], rel=1e-4)
        assert torch.allclose(row, every[place][2], atol=1e-3)
    assert Manifest.read(tmp_path / "kept").facts["keep_when"] == rule


def test_the_rows_are_the_models(
    runner: EngineRunner,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runners, "IN_FLIGHT", 7)  # Fewer than a shard has prompts.
    data = run(runner, source, tmp_path / "out")
    assert len(data) == 60 and len(data.shards) > 3
    reference, done = Reference(MODEL), 0
    ids = data.columns.column("token_id").to_pylist()
    tokens = data.columns.column("token").to_pylist()
    told = source.read_text().splitlines()
    for number in range(6):
        count = len(data.layer(1)[number])
        expected = reference.stream(ids[done : done + count])
        for layer in (1, 4):
            found = data.layer(layer)[number]
            assert relative_error(found, expected[layer, "post_block"]) < 1e-4
        assert "".join(tokens[done + 1 : done + count]).startswith(told[number])
        done += count


def test_values_are_those_of_a_plain_torch_load(
    runner: EngineRunner, source: Path, tmp_path: Path
) -> None:
    data = run(runner, source, tmp_path / "out", values_dtype="float16")
    view = data.layer(4)
    assert view.to_torch().dtype == torch.float16
    loader: Any = torch.utils.data.DataLoader(
        view, batch_size=8, collate_fn=torch.cat, shuffle=False
    )
    assert torch.equal(torch.cat(list(loader)), view.to_torch())
