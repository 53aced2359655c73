# SPDX-License-Identifier: Apache-2.0
"""Records checks over several processes in the results of parity."""

import fcntl
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "parity" / "results.json"
FACTS = {"tensor": "tensor_parallel", "pipeline": "pipeline_parallel"}
"""The fact that an entry gets, by split."""


def record(architecture: str, split: str, path: Path = RESULTS) -> None:
    """Note that `architecture` was checked in float32 on a CPU."""
    key = f"{architecture} float32 cpu"
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text = path.read_text()
        entries: dict[str, dict[str, Any]] = json.loads(text) if text else {}
        entry = entries.setdefault(key, _empty(architecture))
        entry[FACTS[split]] = True
        path.write_text(json.dumps(dict(sorted(entries.items())), indent=1) + "\n")


def _empty(architecture: str) -> dict[str, Any]:
    return {
        "architecture": architecture,
        "dtype": "float32",
        "device": "cpu",
        "variants": [],
        "hook_points": [],
        "date": datetime.now(UTC).date().isoformat(),
        "cases": {},
        "max_relative_error": None,
        "intervention_error": None,
    }
