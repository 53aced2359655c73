# SPDX-License-Identifier: Apache-2.0
"""Formats the reports as a page of the documentation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from textwrap import shorten
from typing import Any, NamedTuple

from fork.architectures.registry import LIBRARY, MULTIMODAL, TEXT
from fork.architectures.reports import ArchitectureReport
from fork.architectures.unproven import Results, stands_in, unexplained
from fork.weave.decoder_layers import Layer
from fork.weave.several_streams import STREAMS

_RAISED = re.compile(r"[\w.]*(Error|Exception|Exit)\b")

_TITLES = {
    TEXT: "Text generation",
    LIBRARY: "Upstream's Transformers backend",
    MULTIMODAL: "Multimodal",
}
_HEAD = """\
<!-- SPDX-License-Identifier: Apache-2.0 -->
<!-- Written by `make models`. -->
# Supported models

Every architecture of upstream's registry, the hook points of its decoder layers, and
what was compared with the Transformers library. `python -m fork models` prints this
page; with `--upstream`, that of another release.

- **3** stands for `pre_attn`, `post_attn` and `post_block`; **5** for these with
  `mlp_in` and `mlp_out`, **7** also with `attn_add` and `mlp_add`; **3-5** where only
  some of the layers have them. *streams*: these count `streams_pre` and `streams_post`,
  which layers of several streams have in place of the three.
- **by** says what placed the points: *analysis*, or a *rule* that helps it.
- **CPU** and **CUDA** give the largest relative error of any captured row, by dtype,
  and of a change at a hook point after `/`; **TP** and **PP** whether several
  processes were compared too. A dash: not compared there. After `≤` stands what the
  tests allow: they passed, in a run that kept no figures.

An architecture that is refused runs as upstream's. A server that is asked to capture
or steer with it stops when it starts, and says why.
"""


_STREAM = ("pre_attn", "post_attn", "post_block")
_INNER = {"attn_in", "z", "mlp_act", "router_logits", "final_norm"}


class _CaseName(NamedTuple):
    architecture: str
    variant: str
    device: str

    def __str__(self) -> str:
        plain = self.variant in ("plain", "none")
        return self.architecture if plain else f"{self.architecture}, {self.variant}"


def _lacking(layer: Layer) -> Iterator[str]:
    for found, where in ((layer.lacks, ""), (layer.sometimes, " in some layers")):
        for reason in dict.fromkeys(found.values()):
            points = [point for point, why in found.items() if why == reason]
            yield f"without {' and '.join(points)}{where}: {reason}"


def page(rows: list[ArchitectureReport], results: Results) -> str:
    """The reports as a Markdown page."""
    parts = [_HEAD, *_counts(rows)]
    for kind, title in _TITLES.items():
        of_kind = [row for row in rows if row.table == kind]
        parts += ["", f"## {title}", "", *_table(of_kind, results)]
    parts += ["", "## Inside the block", "", *_inside(results)]
    parts += ["", "## Not proven, and why", "", *_not_proven(rows, results)]
    parts += ["", "## Proven under other names", "", *_instead(rows, results)]
    parts += ["", "## How some were compared", "", *_notes(results)]
    parts += ["", "## Refused and conditional", "", *_reasons(rows), ""]
    return "\n".join(parts)


def _counts(rows: list[ArchitectureReport]) -> Iterator[str]:
    yield "| table | names | with hook points | refused |"
    yield "|---|---:|---:|---:|"
    for kind in (*_TITLES, "pooling", "draft"):
        of_kind = [row for row in rows if row.table == kind]
        refused = sum(bool(row.refused) for row in of_kind)
        tapped = len(of_kind) - refused
        yield f"| {kind} | {len(of_kind)} | {tapped} | {refused} |"


def _table(rows: list[ArchitectureReport], results: Results) -> Iterator[str]:
    yield "| architecture | points | by | CPU | CUDA | TP | PP |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        found = [e for e in results.values() if e["architecture"] == row.architecture]
        cells = [
            row.architecture,
            "refused" if row.refused else _points(row),
            _placed_by(row),
            _compared(found, "cpu"),
            _compared(found, "cuda"),
            _several(found, "tensor_parallel"),
            _several(found, "pipeline_parallel"),
        ]
        yield f"| {' | '.join(cells)} |"


def _points(row: ArchitectureReport) -> str:
    parts = {p for layer in row.layers if len(layer.points) == 1 for p in layer.points}
    whole = [layer for layer in row.layers if len(layer.points) > 1]
    if not whole:
        return "its model's"
    counts = sorted({len(parts | set(layer.points)) for layer in whole})
    text = "-".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
    several = any({*STREAMS} <= {*layer.points} for layer in whole)
    return f"{text}, streams" if several else text


def _placed_by(row: ArchitectureReport) -> str:
    if row.refused or not row.layers:
        return "–"
    return "rule" if any(layer.rule for layer in row.layers) else "analysis"


def _compared(found: list[Mapping[str, Any]], device: str) -> str:
    cells = [
        f"{entry['dtype']} {'≤ ' if entry.get('at_most') else ''}"
        f"{entry['max_relative_error']:.0e} / {entry['intervention_error']:.0e}"
        for entry in found
        if entry["device"] == device and entry.get("max_relative_error") is not None
    ]
    return "<br>".join(cells) or "–"


def _inside(results: Results) -> Iterator[str]:
    """The points inside the block that were compared, and why others were not."""
    yield "Points of `--hook-points` whose rows were compared with the library's in"
    yield "every layer that has them. `attn_add`, `mlp_add` and `embed` are compared as"
    yield "sums that make one point of the stream of another."
    yield ""
    proven: dict[tuple[str, str], dict[str, None]] = {}
    lacking: dict[str, dict[str, None]] = {}
    for entry in results.values():
        points = [p for p in entry.get("hook_points", ()) if p not in _STREAM]
        if _INNER & {*points}:
            key = entry["device"].upper(), " ".join(points)
            proven.setdefault(key, {})[entry["architecture"]] = None
    for name, case in _cases(results):
        for point, why in case.get("unproven", {}).items():
            lacking.setdefault(why, {})[f"{name.architecture} (`{point}`)"] = None
    for (device, text), names in sorted(proven.items()):
        yield f"- {device}, {len(names)} with `{text}`: {', '.join(sorted(names))}."
    for text, whose in sorted(lacking.items()):
        yield f"- Not compared, {text}: {', '.join(sorted(whose))}."


def _not_proven(rows: list[ArchitectureReport], results: Results) -> Iterator[str]:
    """Each reason once, with the configurations and devices to which it applies."""
    yield "What the suite's last run on a device gave no proof of. What upstream said"
    yield "when it stopped is in code."
    yield ""
    listed = {row.architecture for row in rows}
    found = ((n, e) for n, e in _cases(results) if n.architecture in listed)
    about: dict[str, dict[str, set[str]]] = {}
    for name, case in found:
        if not case["proven"]:
            text = _shortened(case["reason"])
            about.setdefault(text, {}).setdefault(str(name), set()).add(name.device)
    for text, names in sorted(about.items()):
        which = (f"{n} ({', '.join(sorted(d))})" for n, d in names.items())
        yield f"- {', '.join(which)}: {text}."
    if missed := list(unexplained(rows, results)):
        yield f"- {', '.join(missed)}: no case is written."


def _instead(rows: list[ArchitectureReport], results: Results) -> Iterator[str]:
    """What stands in for a proof, with the architectures that have none by name."""
    about: dict[str, list[str]] = {}
    for architecture, text in stands_in(rows, results).items():
        if text:
            about.setdefault(text, []).append(architecture)
    for text, names in sorted(about.items()):
        yield f"- {', '.join(names)}: {text}."


def _notes(results: Results) -> Iterator[str]:
    """The suite's notes about how it compared."""
    yield "- All of the multimodal ones: their language model, with text alone."
    proven = [case for _, case in _cases(results) if case["proven"]]
    gpus = Counter(case["gpu"] for case in proven if "gpu" in case)
    for gpu, configurations in sorted(gpus.items()):
        yield f"- Configurations proven under CUDA, on {gpu}: {configurations}."
    about: dict[str, set[str]] = {}
    for name, case in _cases(results):
        for note in case.get("notes", ()):
            about.setdefault(note, set()).add(name.architecture)
    for text, names in sorted(about.items()):
        yield f"- {', '.join(sorted(names))}: {text}."


def _cases(results: Results) -> Iterator[tuple[_CaseName, Mapping[str, Any]]]:
    for entry in results.values():
        for variant, case in entry.get("cases", {}).items():
            device = entry["device"].upper()
            yield _CaseName(entry["architecture"], variant, device), case


def _shortened(reason: str) -> str:
    """Format the text of an exception as code, shortened; leave other text alone."""
    if not _RAISED.match(reason):
        return reason
    text = shorten(reason.rstrip("."), 160, placeholder=" ...")
    return f"`{text.replace('`', chr(39))}`"


def _several(found: list[Mapping[str, Any]], fact: str) -> str:
    return "yes" if any(entry.get(fact) for entry in found) else "–"


def _reasons(rows: list[ArchitectureReport]) -> Iterator[str]:
    """Each reason once, with the architectures to which it applies."""
    about: dict[str, list[str]] = {}
    for row in rows:
        if row.table in _TITLES:
            remarks = [row.refused] if row.refused else list(_conditions(row))
            for text in dict.fromkeys(remarks):
                about.setdefault(text, []).append(row.architecture)
    for text, names in about.items():
        yield f"- {', '.join(names)}: {text}."


def _conditions(row: ArchitectureReport) -> Iterator[str]:
    for layer in row.layers:
        if layer.refused:
            yield f"{layer.name}: {layer.refused}"
        if layer.meaning:
            yield f"{layer.name}: {layer.meaning}"
        yield from (f"{layer.name}: {text}" for text in _lacking(layer))
        if layer.partial:
            points = " and ".join(layer.partial)
            yield f"{layer.name}: {points} with one tensor-parallel rank only"
        yield from (f"refused with {reason}" for reason in layer.unless)
    if row.note and row.layers and not row.wraps and row.table != LIBRARY:
        yield row.note
