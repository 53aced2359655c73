# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

from tests.multiprocess.record import record


def test_a_check_is_added_to_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    known = {"architecture": "Toy", "variants": ["plain"]}
    path.write_text(json.dumps({"Toy float32 cpu": known}))
    record("Toy", "tensor", path)
    record("Other", "pipeline", path)
    entries = json.loads(path.read_text())
    assert entries["Toy float32 cpu"] == known | {"tensor_parallel": True}
    assert entries["Other float32 cpu"]["pipeline_parallel"] is True
    assert entries["Other float32 cpu"]["variants"] == []
