# SPDX-License-Identifier: Apache-2.0
"""The workloads and the table of `benchmarks/adapters.py`."""

import json
from pathlib import Path

from benchmarks.adapters import case_of, line, of_model, toy


def test_a_models_workload_has_rows_of_four_layers(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 30}
    (tmp_path / "config.json").write_text(json.dumps(config))
    work = of_model(tmp_path)
    assert work.layers == [6, 14, 21, 29]
    assert work.engine["max_model_len"] >= work.length + work.generated
    assert [len(ids) for ids in work.tokens()] == [work.length] * work.prompts
    fields = work.chat_fields()["capture"]["inline"]
    assert fields == {"hooks": {"post_block": work.layers}, "positions": "all"}
    assert toy().chat_fields()["capture"]["inline"]["positions"] == "all_prompt"


def test_ratios_are_those_of_turns_and_the_goal_is_marked() -> None:
    costs = {"own": [(1.0, 2.0), (2.0, 4.0), (4.0, 8.0)]}
    slower = [(1.1 * cpu, 1.2 * elapsed) for cpu, elapsed in costs["own"]]
    case = case_of(costs | {"adapter": slower})
    told = line("one", case)
    assert "| 2200 | 2000 | **1.100** (over the goal) | 1.100 to 1.100 |" in told
    assert told.endswith("| 1.200 | 1.200 to 1.200 |")
    assert "goal" not in line("one", case_of(costs | {"adapter": costs["own"]}))
