# SPDX-License-Identifier: Apache-2.0
"""A vector and a probe pass few files from their field to the step and back.

Counted are the files in which functions run for a request that has the field and not
for one that has none. A larger number means another stop on the way: find out whether
it has an idea of its own before the bound is raised.
"""

import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import vllm
from tests.support.captured import prompt
from tests.support.models import llama
from tests.v1.readouts._reading import HIDDEN, Modules, draw
from tests.v1.steering._engine import engine as steering_engine
from tests.v1.steering._engine import generate, params
from vllm import LLM

pytestmark = pytest.mark.e2e

ROOT, OURS = Path(vllm.__file__).parent, Path(__file__).parents[4] / "vllm"
MOST_OF_A_VECTOR, MOST_OF_A_PROBE = 12, 24


def functions(llm: LLM, seed: int, **fields: Any) -> dict[str, set[str]]:
    """The functions of each of our files that a request runs on any thread."""
    ran: defaultdict[str, set[str]] = defaultdict(set)

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(f"{ROOT}/"):
            ran[frame.f_code.co_filename].add(frame.f_code.co_name)

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        generate(llm, [prompt(20, seed)], [params(**fields)])
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]
    names = {name: str(Path(name).relative_to(ROOT)) for name in ran}
    return {names[name]: ran[name] for name in ran if (OURS / names[name]).exists()}


def test_from_a_field_to_its_effect(modules: Modules, tmp_path: Path) -> None:
    llm = steering_engine(str(llama(tmp_path)), **modules.options)
    fields: dict[str, dict[str, Any]] = {
        "plain": {},
        "vector": {"steering_vectors": {"post_block": {1: draw(HIDDEN, seed=5)}}},
        "probe": {"readouts": {"d": {"kind": "probe", "probe": "direction"}}},
    }
    for given in fields.values():  # What happens once is no part of the way.
        functions(llm, 1, **given)
    ran = {name: functions(llm, 2, **given) for name, given in fields.items()}
    llm.llm_engine.engine_core.shutdown()
    files = {
        name: sorted(f for f in of if of[f] - ran["plain"].get(f, set()))
        for name, of in ran.items()
    }
    assert "v1/steering/worker/tables.py" in files["vector"]
    assert "v1/readouts/worker/operations.py" in files["probe"]
    assert len(files["vector"]) <= MOST_OF_A_VECTOR, files["vector"]
    assert len(files["probe"]) <= MOST_OF_A_PROBE, files["probe"]
