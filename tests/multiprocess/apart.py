# SPDX-License-Identifier: Apache-2.0
"""Runs modules that execute an order in a separate process."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
"""Variables of processes with small engines on a CPU."""


def runner(pipeline: int) -> str:
    """`VLLM_USE_V2_MODEL_RUNNER`: on a CPU only the V2 runner has several stages."""
    return "1" if pipeline > 1 else "0"


def carry_out(module: str, order: Any, found: Path, timeout: float) -> dict[str, Any]:
    """Run `python -m module ORDER.json`; returns what it saves at `found`.

    `order` is a dataclass with the variables of its `environment`. The processes'
    output is in a file next to `found`.
    """
    import torch

    note, log = found.with_suffix(".json"), found.with_suffix(".log")
    note.write_text(json.dumps(asdict(order)))
    with log.open("w") as output:
        done = subprocess.run(
            [sys.executable, "-m", module, str(note)],
            cwd=Path(__file__).parents[2],
            env=os.environ | order.environment,
            stdout=output,
            stderr=output,
            timeout=timeout,
        )
    said = log.read_text(errors="replace")
    # Other processes fail because one did: the first errors give the reason.
    errors = [line for line in said.splitlines() if " ERROR " in line]
    assert done.returncode == 0, "\n".join([*errors[:60], said[-9000:]])
    saved: dict[str, Any] = torch.load(found, weights_only=False)
    return saved
