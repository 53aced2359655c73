# SPDX-License-Identifier: Apache-2.0
"""A sweep as it is asked for, and its plan."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import numpy as np

from vllm.patching.alignment import align
from vllm.patching.engine import Engine
from vllm.patching.grid import (
    Cell,
    Column,
    Grid,
    Prompt,
    columns_of,
    grid_of,
    prompt_of,
)
from vllm.patching.questions import Steering, question_of
from vllm.patching.study import Plan
from vllm.v1.capture.consumers.memory.api import kept_run
from vllm.v1.capture.errors import CaptureValidationError
from vllm.v1.residual.numbers import is_integer
from vllm.v1.steering.errors import fail

OWN = ("mean", "noise")
"""Sources that are made of the prompt's own rows."""
EMBEDDINGS = (0, "pre_attn")
"""Where the embeddings enter the stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A sweep, as a caller of `patch_sweep` or the server's route describes it."""

    prompt: Any
    """The prompt that is patched: text, or token ids."""
    other: Any = None
    """The prompt from whose run rows come; None if they come from elsewhere."""
    run: str | None = None
    """The name of the kept run, or under which it is kept."""
    source: Any = None
    """Where rows come from if not from a run: `"zeros"`, `"mean"`, `"noise"`, a
    module's name, or a row."""
    subject: Any = None
    """A span whose embeddings get noise; rows come from the run without it."""
    hooks: Any = ("post_block",)
    layers: Any = "all"
    positions: Any = "all"
    heads: Any = None
    metric: Any = "logit_diff"
    answer: Any = None
    foil: Any = None
    single: Sequence[str] = ()
    """Which of `answer` and `foil` must be one token."""
    effect: Any = "denoise"
    alpha: Any = 1.0
    mask: Any = None
    noise: float = 3.0
    """Standard deviations of the rows, as which noise is drawn."""
    seed: int = 0
    known_source: float = math.nan
    """The value of the run from which rows come, if the caller knows it."""


def plan_of(sweep: Sweep, engine: Engine) -> Plan:
    """Check a sweep, and plan it.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    target = _prompt(sweep.prompt, "prompt", engine)
    source, run, keeps = _run_of(sweep, engine, target)
    other = target if source is None else source
    alignment = align(other.token_ids, target.token_ids)
    columns = columns_of(sweep.positions, target, other, alignment, "positions")
    grid = grid_of(sweep.hooks, sweep.layers, sweep.heads, columns, engine.facts)
    recovers = sweep.metric == "recovered"
    metric = sweep.metric
    if recovers:
        metric = "logprob" if sweep.foil is None else "logit_diff"
    question = question_of(
        metric,
        sweep.answer,
        sweep.foil,
        engine.tokenizer,
        engine.facts.vocabulary,
        sweep.single,
    )
    ablates = sweep.source is not None
    unknown = metric == "kl" or (recovers and math.isnan(sweep.known_source))
    if source is None and not ablates and unknown:
        raise fail(
            f"metric: {sweep.metric} compares with the clean run, whose prompt is not "
            "known; give clean_prompt",
            "metric",
            sweep.metric,
        )
    if ablates and recovers:
        raise fail(
            "metric: an ablation has one prompt, from which nothing is recovered; use "
            "logprob, logit_diff or kl",
            "metric",
            sweep.metric,
        )
    if sweep.effect not in ("denoise", "noise"):
        raise fail('effect must be "denoise" or "noise"', "effect", sweep.effect)
    longest = len(target.token_ids) + max(len(question.answer), len(question.foil), 1)
    if longest > engine.facts.max_length:
        raise fail(
            f"prompt: with the answer it has {longest} tokens, and --max-model-len is "
            f"{engine.facts.max_length}",
            "prompt",
            longest,
        )
    subject = _subject(sweep, target)
    patch, making = _patch_of(sweep, run, keeps, engine)
    _check(grid, making, engine)
    num_same = alignment.prefix if keeps and not ablates else 0
    return Plan(
        grid=grid,
        question=question,
        recovers=recovers,
        target=target.token_ids,
        source=None if source is None or ablates else source.token_ids,
        patch=patch,
        last_layer=engine.facts.last_layer,
        capture=_capture(sweep, grid, run, subject, engine) if keeps else None,
        noise=_noise(sweep, run, subject, engine) if subject else None,
        num_same=min(subject, default=num_same),
        effect="ablate" if ablates else sweep.effect,
        most_logprobs=engine.facts.most_logprobs,
        tokens=target.texts,
        known_source=sweep.known_source,
        alignment=alignment,
        run=run,
    )


def _prompt(raw: Any, name: str, engine: Engine) -> Prompt:
    """A prompt's tokens and their texts."""
    tokenizer = engine.tokenizer
    if isinstance(raw, str) and tokenizer is not None:
        raw = tokenizer.encode(raw)
    stop = engine.facts.vocabulary
    listed = isinstance(raw, (list, tuple)) and len(raw) > 0
    if not listed or not all(is_integer(token, 0, stop) for token in raw):
        raise fail(
            f"{name} must be text, or a list of token ids from 0 to {stop - 1}",
            name,
            raw,
        )
    if len(raw) >= engine.facts.max_length:
        raise fail(
            f"{name}: it has {len(raw)} tokens, and --max-model-len is "
            f"{engine.facts.max_length}",
            name,
            len(raw),
        )
    if tokenizer is None:
        return Prompt(tuple(raw), ("",) * len(raw))
    return prompt_of(raw, tokenizer.decode)


def _run_of(
    sweep: Sweep, engine: Engine, target: Prompt
) -> tuple[Prompt | None, str | None, bool]:
    """The prompt of the run that rows come from, its name, and whether it must run."""
    needs_run = sweep.source is None or (
        isinstance(sweep.source, str) and sweep.source in OWN
    )
    if not needs_run:
        return None, None, False
    name = sweep.run or f"sweep-{uuid4().hex[:16]}"
    other = target if sweep.subject is not None or sweep.source else None
    if other is None and sweep.other is not None:
        other = _prompt(sweep.other, "clean_prompt", engine)
    try:
        kept = None if sweep.run is None else kept_run(engine.capture, name, "run")
    except CaptureValidationError as error:
        if other is None:
            raise fail(
                f"{error.args[0]}; or give clean_prompt, which is then captured",
                "source_run",
                name,
            ) from error
        kept = None
    if kept is None:
        if other is None:
            raise fail(
                "clean_prompt: give the prompt from whose run rows come, or the "
                "source_run that is kept of it",
                "clean_prompt",
                None,
            )
        return other, name, True
    count = kept.num_prompt_tokens
    if other is None and count != len(target.token_ids):
        raise fail(
            f"source_run: its prompt has {count} tokens, and the prompt "
            f"{len(target.token_ids)}; give clean_prompt, by which they are aligned",
            "source_run",
            name,
        )
    if other is not None and count != len(other.token_ids):
        raise fail(
            f"clean_prompt: it has {len(other.token_ids)} tokens, and that of the run "
            f"{name!r} {count}; give the prompt of the run, or another run",
            "clean_prompt",
            len(other.token_ids),
        )
    return other, name, False


def _subject(sweep: Sweep, target: Prompt) -> list[int]:
    """The positions of the subject that gets noise; none without one."""
    if sweep.subject is None:
        return []
    raw = sweep.subject
    items = list(raw) if isinstance(raw, (list, tuple)) else [raw]
    items = [{"span": item} if isinstance(item, str) else item for item in items]
    ids = target.token_ids
    columns = columns_of(items, target, target, align(ids, ids), "subject")
    return sorted({position for column in columns for position in column.targets})


def _patch_of(
    sweep: Sweep, run: str | None, keeps: bool, engine: Engine
) -> tuple[Callable[[Cell], Mapping[str, Any]], Callable[[Cell], Mapping[str, Any]]]:
    """What makes a cell's entry, and one to check before the run is kept."""
    common: dict[str, Any] = {"op": "replace"}
    if sweep.alpha != 1.0 or isinstance(sweep.alpha, bool):
        common["alpha"] = sweep.alpha
    if sweep.mask is not None:
        common["mask"] = sweep.mask

    def placed(cell: Cell) -> dict[str, Any]:
        entry = {**common, "positions": list(cell.column.targets)}
        return entry if cell.head is None else {**entry, "heads": [cell.head]}

    def of_run(cell: Cell) -> dict[str, Any]:
        rows = {"run": run, "positions": list(cell.column.sources)}
        return {**placed(cell), "from": rows}

    def made(cell: Cell) -> dict[str, Any]:
        return {**placed(cell), "vector": _own_row(sweep, str(run), cell, engine)}

    def given(cell: Cell) -> dict[str, Any]:
        key = "from" if isinstance(sweep.source, str) else "vector"
        return {**placed(cell), key: sweep.source}

    def zeros(cell: Cell) -> dict[str, Any]:
        return {**placed(cell), "from": "zeros"}

    if run is None:
        return given, given
    if sweep.source is not None:
        return made, zeros
    return of_run, zeros if keeps else of_run


def _check(
    grid: Grid, entry: Callable[[Cell], Mapping[str, Any]], engine: Engine
) -> None:
    """Check an entry at each layer of each hook point before anything runs."""
    pairs = {
        target: source
        for column in grid.columns
        if column.reason is None
        for target, source in zip(column.targets, column.sources, strict=True)
    }
    if not pairs:
        raise fail(
            "positions: none of them has a counterpart in the clean prompt; choose "
            "others, or align them by spans with a source",
            "positions",
            [column.targets for column in grid.columns],
        )
    every = Column(tuple(pairs), tuple(pairs.values()))
    head = None if grid.heads is None else grid.heads[0]
    for hook, layers in grid.taps().items():
        for layer in layers:
            whole = Cell(hook, layer, head, every, ())
            engine.check({hook: {layer: [entry(whole)]}})


def _capture(
    sweep: Sweep, grid: Grid, run: str | None, subject: Sequence[int], engine: Engine
) -> dict[str, Any]:
    """What is kept of the run."""
    if engine.facts.keeper is None:
        raise fail(
            "patch_sweep: no consumer keeps the clean run; start the engine with "
            "--enable-patching, or add the consumer memory",
            "enable_patching",
            None,
        )
    hooks = {hook: list(layers) for hook, layers in grid.taps().items()}
    positions: Any = sorted({p for c in grid.columns for p in c.sources})
    if subject:
        layer, hook = EMBEDDINGS
        hooks[hook] = sorted({layer, *hooks.get(hook, ())})
        positions = "all_prompt"
    if isinstance(sweep.source, str):
        positions = "all_prompt"
    instance, key = engine.facts.keeper
    return {instance: {key: run, "hooks": hooks, "positions": positions}}


def _own_row(sweep: Sweep, run: str, cell: Cell, engine: Engine) -> Any:
    """The row of a source that is made of the prompt's own rows, or a head's part."""
    rows = _rows(engine, run, (cell.layer, cell.hook))
    row = rows.mean(axis=0)
    if sweep.source == "noise":
        places = list(cell.column.targets)
        random = np.random.default_rng([sweep.seed, cell.layer, *places])
        drawn = random.standard_normal(rows.shape[1], dtype=np.float32)
        row = rows[places].mean(axis=0) + sweep.noise * rows.std() * drawn
    if cell.head is None:
        return row
    return row.reshape(engine.facts.heads[cell.hook], -1)[cell.head]


def _noise(
    sweep: Sweep, run: str | None, subject: Sequence[int], engine: Engine
) -> Callable[[], Steering]:
    """Noise on the embeddings of the subject, once the run is kept."""

    def disturbed() -> Steering:
        layer, hook = EMBEDDINGS
        rows = _rows(engine, str(run), EMBEDDINGS)
        drawn = np.random.default_rng(sweep.seed).standard_normal(
            (len(subject), rows.shape[1]), dtype=np.float32
        )
        noised = rows[list(subject)] + sweep.noise * rows.std() * drawn
        entry = {"op": "replace", "vectors": noised, "positions": list(subject)}
        return {hook: {layer: [entry]}}

    return disturbed


def _rows(engine: Engine, run: str, tap: tuple[int, str]) -> Any:
    """The rows of a run's whole prompt, float32 `[tokens, width]`."""
    return kept_run(engine.capture, run).rows[tap].float().numpy()
