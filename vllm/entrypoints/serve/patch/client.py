# SPDX-License-Identifier: Apache-2.0
"""`PatchStudy` of an earlier fork: sweeps on a server, by the route.

New scripts call `vllm.patching.patch_sweep` with a `clearbox_client.Client`.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from clearbox_client import Client
from clearbox_client.vectors import pack_rows

from vllm.patching.grid import Prompt, Span
from vllm.patching.picture import draw
from vllm.patching.questions import Question, Reply
from vllm.patching.remote import places
from vllm.patching.result import PatchResult

Grid = npt.NDArray[np.float32]
Places = Sequence[int | Span] | str


pack_vectors = pack_rows
"""Rows `[n, width]` in the form of `patch_vectors`."""


@dataclass(frozen=True, slots=True)
class CleanRun:
    """A kept run, and what it answered."""

    run_id: str
    num_prompt_tokens: int
    hook: str
    answer_token: str | None
    clean_logprob: float | None
    clean_logit_diff: float | None
    prompt: str | Sequence[int]


@dataclass(slots=True)
class SweepResult:
    """The grid `[layers, positions]` of one hook point."""

    layers: list[int]
    positions: list[int]
    hook: str
    metric_name: str
    grid: Grid
    clean: float | None = None
    corrupt: float | None = None
    notes: list[dict[str, Any]] = field(default_factory=list)
    """The cells without a value, with the reasons."""
    auto_captured: bool = False
    captured_source_run: str | None = None
    noise_floor: float | None = None

    def to_numpy(self) -> Grid:
        """The grid, NaN where there is no value."""
        return self.grid

    def argmax_cell(self) -> tuple[int, int, float]:
        """Layer, position and value of the largest value."""
        row, column = np.unravel_index(np.nanargmax(self.grid), self.grid.shape)
        value = float(self.grid[row, column])
        return self.layers[row], self.positions[column], value

    def top(self, k: int = 5) -> list[tuple[int, int, float]]:
        """The k largest values, with layer and position."""
        order = np.argsort(-self.grid, axis=None, kind="stable")  # NaN comes last.
        places = [np.unravel_index(one, self.grid.shape) for one in order]
        cells = [
            (self.layers[row], self.positions[column], float(self.grid[row, column]))
            for row, column in places
        ]
        return [cell for cell in cells if not math.isnan(cell[2])][:k]

    def heatmap(self, ax: Any = None) -> Any:
        """Draw the grid, into axes of matplotlib or a figure of its own."""
        if ax is None:
            groups = tuple((position,) for position in self.positions)
            names = ("",) * (max(self.positions, default=0) + 1)
            base = math.nan if self.corrupt is None else self.corrupt
            values = {self.hook: self.grid}
            layers = tuple(self.layers)
            name = self.metric_name
            result = PatchResult(values, layers, None, groups, names, name, base, base)
            return draw(result, None)
        ax.imshow(self.grid, aspect="auto", origin="lower")
        return ax


class PatchStudy:
    """Sweeps on one server; its calls run on threads."""

    def __init__(
        self,
        *,
        model: str,
        base_url: str = "http://localhost:8000/v1",
        api_key: str = "unused",
        concurrency: int = 16,
        hook: str = "post_block",
        logprobs: int = 20,
    ) -> None:
        """Open a study.

        `concurrency` and `logprobs` have no effect: the server runs the cells, and
        answers with the log-probabilities of the tokens that are asked for.
        """
        self._client = Client(base_url, model, api_key)
        self._hook = hook

    async def capture_clean(
        self,
        prompt: str | Sequence[int],
        *,
        run: str,
        layers: Any = "all",
        hook: str | None = None,
        positions: Any = "all_prompt",
        answer_token: str | None = None,
        foil_token: str | None = None,
    ) -> CleanRun:
        """Run a prompt and keep its rows under a name."""
        hook = hook or self._hook
        spec = {"run": run, "hooks": {hook: layers}, "positions": positions}
        ids = await self._ids(prompt)
        named = [one for one in (answer_token, foil_token) if one is not None]
        tokens = [await self._one_token(text) for text in named]
        fields: dict[str, Any] = {"max_tokens": 1, "temperature": 0}
        if tokens:
            fields |= {"logprobs": len(set(tokens)), "logprob_token_ids": tokens}
            fields["return_tokens_as_token_ids"] = True
        reply = await asyncio.to_thread(
            self._client.complete, ids, capture={"patch_source": spec}, **fields
        )
        logprob = difference = None
        if tokens:
            top = reply.raw["choices"][0]["logprobs"]["top_logprobs"][0]
            found = Reply({int(k.removeprefix("token_id:")): v for k, v in top.items()})
            answer, foil = tuple(tokens[:1]), tuple(tokens[1:])
            logprob = Question("logprob", answer).value([found])
            if foil:
                difference = Question("logit_diff", answer, foil).value([found])
        count = len(ids)
        return CleanRun(run, count, hook, answer_token, logprob, difference, prompt)

    async def positions_for(
        self, prompt: str, span: str, *, occurrence: int = 0
    ) -> list[int]:
        """The positions of the tokens that contain a text of the prompt."""
        ids = await self._ids(prompt)
        texts = await asyncio.to_thread(self._client.token_texts, ids)
        known = Prompt(tuple(ids), tuple(texts))
        return list(known.tokens_of(span, occurrence, "span"))

    async def sweep_layers_positions(
        self,
        corrupt_prompt: str | Sequence[int],
        *,
        run: str | None = None,
        layers: Any = "all",
        positions: Places = "all_prompt",
        hook: str | None = None,
        alpha: float = 1.0,
        answer_token: str,
        foil_token: str | None = None,
        metric: str = "logprob",
        clean: CleanRun | None = None,
        clean_prompt: str | Sequence[int] | None = None,
        server_side: bool = False,
        hooks: Sequence[str] | None = None,
        keep_source: bool = False,
        on_cell: Callable[[dict[str, Any]], Any] | None = None,
    ) -> SweepResult | dict[str, SweepResult]:
        """Patch a prompt with rows of a run; with `hooks`, a result for each of them.

        `server_side` has no effect: the server always runs the cells.
        """
        if clean is not None:
            run, clean_prompt = run or clean.run_id, clean_prompt or clean.prompt
        return await self._swept(
            hook,
            hooks,
            on_cell,
            prompt=corrupt_prompt,
            source_run=run,
            clean_prompt=clean_prompt,
            layers=layers,
            positions=spans_of(positions),
            alpha=alpha,
            answer_token=answer_token,
            foil_token=foil_token,
            metric=metric,
            keep_source=keep_source,
        )

    async def zoom(
        self,
        result: SweepResult,
        *,
        corrupt_prompt: str | Sequence[int],
        run: str,
        around: tuple[int, int] | None = None,
        layer_radius: int = 3,
        position_radius: int = 3,
        answer_token: str,
        **asked: Any,
    ) -> Any:
        """Sweep around a cell of an earlier result, by default around its largest."""
        layer, position = around or result.argmax_cell()[:2]
        layers = range(layer - layer_radius, layer + layer_radius + 1)
        places = range(position - position_radius, position + position_radius + 1)
        ids = await self._ids(corrupt_prompt)
        status = await asyncio.to_thread(self._client.capture_status)
        known = set(map(int, status["hook_points"]))
        return await self.sweep_layers_positions(
            corrupt_prompt,
            run=run,
            layers=[one for one in layers if one in known],
            positions=[one for one in places if 0 <= one < len(ids)],
            answer_token=answer_token,
            **{"hook": result.hook, "metric": result.metric_name, **asked},
        )

    async def ablation_sweep(
        self,
        corrupt_prompt: str | Sequence[int],
        *,
        layers: Any = "all",
        positions: Places = "all_prompt",
        source: str = "zeros",
        source_inline: int | None = None,
        mask: Any = None,
        patch_vectors: dict[str, Any] | None = None,
        hook: str | None = None,
        alpha: float = 1.0,
        answer_token: str,
        foil_token: str | None = None,
        metric: str = "logprob",
    ) -> Any:
        """Overwrite rows by zeros, by a module's vector or by a row."""
        return await self._swept(
            hook,
            None,
            None,
            prompt=corrupt_prompt,
            source_module=source if source_inline is None else None,
            source_inline=source_inline,
            mask=mask,
            patch_vectors=patch_vectors,
            layers=layers,
            positions=spans_of(positions),
            alpha=alpha,
            answer_token=answer_token,
            foil_token=foil_token,
            metric=metric,
        )

    async def drop_run(self, run: str) -> bool:
        """Drop a kept run; returns whether there was one."""
        return await asyncio.to_thread(self._client.drop_run, run)

    async def _swept(
        self, hook: str | None, hooks: Any, on_cell: Any, **fields: Any
    ) -> SweepResult | dict[str, SweepResult]:
        prompt = fields.pop("prompt")
        names = list(hooks) if hooks is not None else [hook or self._hook]

        def work() -> dict[str, Any]:
            last: dict[str, Any] = {}
            for event in self._client.patch_events(prompt, hooks=names, **fields):
                last = event
                if event["type"] == "cell" and on_cell is not None:
                    on_cell(event)
            return last

        summary = await asyncio.to_thread(work)
        found = {
            one["hook"]: SweepResult(
                summary["layers"],
                summary["positions"],
                one["hook"],
                summary["metric"],
                np.array(one["grid"], np.float32),
                summary["clean"],
                summary["corrupt"],
                [note for note in summary["skipped"] if note["hook"] == one["hook"]],
                summary["auto_captured"],
                summary["captured_source_run"],
                summary["noise_floor"],
            )
            for one in summary["hook_grids"]
        }
        return found if hooks is not None else next(iter(found.values()))

    async def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        return await asyncio.to_thread(self._client.tokenize, prompt)

    async def _one_token(self, text: str) -> int:
        ids = await asyncio.to_thread(self._client.tokenize, text, special=False)
        if len(ids) != 1:
            raise ValueError(f"{text!r} is {len(ids)} tokens; one is needed")
        return ids[0]


def spans_of(positions: Places) -> Any:
    """The positions as the route takes them; a span's first occurrence counts."""
    if isinstance(positions, str):
        return positions
    named = [
        replace(one, occurrence=one.occurrence or 0) if isinstance(one, Span) else one
        for one in positions
    ]
    return places(named)
