# SPDX-License-Identifier: Apache-2.0
"""Checks that the fork's outputs with features off equal upstream's bit for bit."""

from dataclasses import dataclass
from typing import Any

from benchmarks.harness.engine_process import EngineProcess
from benchmarks.harness.models import Model, random_prompts

PROMPTS = random_prompts(6, 3, 60)
MAX_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Equality:
    """The comparison for one model, with the first difference if there is one."""

    model: str
    mode: str
    tokens: int
    logprobs: int
    difference: str | None


def check_processes(upstream: EngineProcess, fork: EngineProcess) -> tuple[Any, Any]:
    """The identities of both sides.

    Raises:
        RuntimeError: a side runs the other's vLLM.
    """
    theirs, ours = upstream.do("identity"), fork.do("identity")
    versions = "".join(theirs["distributions"].values())
    if theirs["has_capture"] or "clearbox" in versions:
        raise RuntimeError(f"the fork leaked into upstream's environment: {theirs}")
    if not ours["has_capture"]:
        raise RuntimeError(f"this environment does not hold the fork: {ours}")
    return theirs, ours


def compare(
    upstream: EngineProcess, fork: EngineProcess, model: Model, eager: bool
) -> Equality:
    """Run the same greedy batch on both sides, which keep the model loaded."""
    results = []
    for side in (upstream, fork):
        side.do("load", model=str(model.folder), dtype=model.dtype, eager=eager)
        results.append(side.do("outputs", prompts=PROMPTS, max_tokens=MAX_TOKENS))
    theirs, ours = results
    return Equality(
        model=model.name,
        mode="eager" if eager else "compiled",
        tokens=sum(len(request["tokens"]) for request in theirs),
        logprobs=sum(map(_count_logprobs, theirs)),
        difference=first_difference(theirs, ours),
    )


def _count_logprobs(request: dict[str, Any]) -> int:
    steps = [*request["logprobs"], *request["prompt_logprobs"]]
    return sum(len(step) for step in steps if step)


def first_difference(theirs: list[Any], ours: list[Any]) -> str | None:
    """The first difference of two lists of outputs; None if they are equal."""
    if len(theirs) != len(ours):
        return f"{len(theirs)} requests against {len(ours)}"
    for number, (one, other) in enumerate(zip(theirs, ours, strict=True)):
        for field in ("tokens", "prompt_logprobs", "logprobs"):
            if one[field] != other[field]:
                return f"request {number}, {field}: {one[field]} / {other[field]}"
    return None
