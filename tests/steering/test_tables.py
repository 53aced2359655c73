# SPDX-License-Identifier: Apache-2.0
import math
from pathlib import Path

import numpy as np
import pytest

from vllm.steering.directions import Direction
from vllm.steering.plot import check_can_draw, draw_sweep
from vllm.steering.sweep import Cell
from vllm.steering.tables import (
    separation_table,
    side_by_side,
    sweep_table,
    vectors_table,
)
from vllm.steering.vectors import vector_set
from vllm.v1.steering.errors import SteeringValidationError
from vllm.v1.steering.spec.provenance import Provenance


def cell(layer: int, scale: float, score: float = math.nan) -> Cell:
    return Cell(
        tap=(layer, "post_block"),
        scale=scale,
        score=score,
        perplexity=2.0 + layer,
        texts=("a",),
    )


CELLS = [cell(layer, scale, layer * scale) for scale in (1, -0.5) for layer in (3, 2)]


def test_texts_stand_side_by_side_and_none_is_cut() -> None:
    texts = ["one two three four five six", "a\nb", "supercalifragilistic" * 2]
    shown = side_by_side(["x", "y", "z"], texts, 60)
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 60
    columns = ["".join(column) for column in zip(*(_cut(line) for line in lines))]
    for text, column in zip(texts, columns):
        assert "".join(text.split()) in column.replace("-", "")


def _cut(line: str) -> list[str]:
    return [part.replace(" ", "") for part in [*line.split(" | "), "", ""][:3]]


def test_a_sweep_is_a_table_of_layers_and_coefficients() -> None:
    head, *rows = sweep_table(CELLS, "score").splitlines()
    assert head.split() == ["layer", "point", "-0.5", "+1"]
    assert [row.split() for row in rows] == [
        ["2", "post_block", "-1.000", "2.000"],
        ["3", "post_block", "-1.500", "3.000"],
    ]
    assert "nan" in sweep_table([cell(1, 0.0)], "score")
    assert cell(1, 0.0).as_json()["score"] is None


def test_a_table_tells_lengths_and_provenance() -> None:
    said = Provenance(model="demo", origin="by hand")
    shown = vectors_table(vector_set({(2, "pre_attn"): [3.0, 4.0]}, said))
    assert "2  pre_attn    5" in shown
    assert "model: demo" in shown and "0-based block index" in shown
    vector = np.array([3.0, 4.0], np.float32)
    found = Direction(vector, in_order=0.9, explained=0.5, stream_norm=10)
    (_, row) = separation_table({(1, "post_block"): found}).splitlines()
    assert row.split() == ["1", "post_block", "5.000", "50.0%", "90%", "50%"]


@pytest.mark.parametrize("cells", [CELLS, [cell(1, 0.0), cell(1, 1.0)]])
def test_a_sweep_is_drawn(tmp_path: Path, cells: list[Cell]) -> None:
    path = tmp_path / "sweep.png"
    check_can_draw(path)
    draw_sweep(path, cells)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_data_that_cannot_be_drawn_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SteeringValidationError, match="no folder"):
        check_can_draw(tmp_path / "a" / "b.png")
    with pytest.raises(SteeringValidationError, match="'b.pngg' is no picture"):
        check_can_draw(tmp_path / "b.pngg")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(SteeringValidationError, match="pip install matplotlib"):
        check_can_draw(tmp_path / "b.png")
