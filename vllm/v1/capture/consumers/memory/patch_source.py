# SPDX-License-Identifier: Apache-2.0
"""The consumer that keeps runs, from which later requests are patched."""

from typing import Any, ClassVar

from vllm.v1.capture.consumers.memory import MemoryConsumer
from vllm.v1.capture.errors import fail
from vllm.v1.capture.types import CaptureContext, CaptureSpec
from vllm.v1.residual.plain_data import plain
from vllm.v1.residual.selectors import first_outside, parse_positions


class PatchSourceConsumer(MemoryConsumer):
    """Keeps the rows of prompts under the names of runs.

    As `memory`, with the spec `{"run": name, "hooks": ..., "positions": "all_prompt"}`.
    A run is one request: a later one of the same name replaces it, unless a sweep is
    using it. Runs that were not used for longest, by a patch or by a reader, make room
    for new ones.
    """

    kind: ClassVar[str] = "patch_source"
    name_key: ClassVar[str] = "run"
    evicts: ClassVar[bool] = True

    def validate_client_spec(self, raw: Any, ctx: CaptureContext) -> CaptureSpec:
        """Check the spec, whose positions must be of the prompt."""
        where = f"capture.{self.instance_name or self.kind}"
        raw = plain(raw)
        if isinstance(raw, dict):
            raw = {"positions": "all_prompt", **raw}
        spec = super().validate_client_spec(raw, ctx)
        if self.store.is_in_use(name := raw.get(self.name_key)):
            raise fail(
                f"{where}.run: a sweep is using the run {name!r}, and all its cells "
                "must have rows of one prompt; choose another name, or wait",
                f"{where}.run",
                name,
            )
        spans = parse_positions(spec.positions, f"{where}.positions", fail)
        of_prompt = spans in ("all_prompt", "last_prompt")
        if not isinstance(spans, str):
            of_prompt = first_outside(spans, *[ctx.num_prompt_tokens] * 2) is None
        if not of_prompt:
            raise fail(
                f"{where}.positions: a run has rows of the prompt, which here has "
                f"{ctx.num_prompt_tokens} tokens; name some of them, or all_prompt",
                f"{where}.positions",
                raw["positions"],
            )
        return spec
