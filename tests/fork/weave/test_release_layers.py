# SPDX-License-Identifier: Apache-2.0
"""The decoder layers of the real release."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from fork.architectures.library import installed
from fork.architectures.page import page
from fork.architectures.reports import UNKNOWN, ArchitectureReport, reports
from fork.building.builder import Order, open_release
from fork.paths import HERE
from fork.weave.decoder_layers import Layer, WeaveResult, weave_module
from fork.weave.rules import NOT_TAPPED, REFUSED, RULES, SINCE
from fork.weaving.cache import digest_of, keep, recall, weave_digest

reported = pytest.mark.soak
"""Finds the layers of every architecture, which each build does too."""

TAPPED, STREAMS, REFUSED_COUNT = 113, 4, 9
"""Number of decoder-layer classes of upstream 0.32.0, of 121, that have points of one
stream, of several streams, and none; two have either, as configured."""


@dataclass(frozen=True)
class Woven:
    version: str
    root: Path
    results: dict[str, WeaveResult]


def woven(source: str, module: str) -> WeaveResult:
    """The result of weaving a module, kept until it or the weave changes."""
    key = digest_of([b"result", module.encode(), source.encode(), weave_digest()])
    record = recall(key)
    if record is None:
        result = weave_module(source, module)
        keep(key, asdict(result))
        return result
    for name in ("layers", "refused"):
        record[name] = tuple(Layer(**with_tuples(one)) for one in record[name])
    return WeaveResult(**with_tuples(record))


def with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields with tuples for the lists that JSON has."""
    return {n: tuple(v) if isinstance(v, list) else v for n, v in fields.items()}


@pytest.fixture(scope="module")
def release() -> Woven:
    opened = open_release(Order(device="cpu"))
    root = opened.root
    results = {}
    for folder in ("vllm/model_executor/models", "vllm/models"):
        for path in sorted((root / folder).rglob("*.py")):
            module = path.relative_to(root).as_posix()
            results[module] = woven(path.read_text(encoding="utf-8"), module)
    return Woven(opened.version, root, results)


@pytest.fixture(scope="module")
def rows(release: Woven) -> list[ArchitectureReport]:
    return reports(release.root, lambda _, module: release.results[module], installed())


def key(module: str, name: str) -> str:
    return f"{module.removeprefix('vllm/').removesuffix('.py')}:{name}"


def test_every_decoder_layer_is_accounted_for(release: Woven) -> None:
    problems = [p for r in release.results.values() for p in r.problems]
    assert problems == []
    whole = [
        key(module, layer.name)
        for module, result in release.results.items()
        for layer in result.layers
        if {"pre_attn", "post_block"} <= set(layer.points)
    ]
    refused = [r for x in release.results.values() for r in x.refused if r.is_layer]
    several = [
        layer
        for result in release.results.values()
        for layer in result.layers
        if {"streams_pre", "streams_post"} <= set(layer.points)
    ]
    counts = len(whole), len(several), len(refused)
    assert counts == (TAPPED, STREAMS, REFUSED_COUNT)


def test_every_rule_and_refusal_is_about_a_class_of_the_release(release: Woven) -> None:
    known = {
        key(module, layer.name)
        for module, result in release.results.items()
        for layer in (*result.layers, *result.refused)
    }
    later = [names for since, names in SINCE.items() if since > release.version]
    assert {*RULES, *REFUSED, *NOT_TAPPED}.difference(*later) <= known


@reported
def test_every_architecture_has_layers_or_a_reason(
    rows: list[ArchitectureReport],
) -> None:
    kinds = {"text", "multimodal", "transformers", "pooling", "draft"}
    assert {row.table for row in rows} == kinds
    assert len(rows) == len({row.architecture for row in rows}) > 380
    for row in rows:
        assert row.refused != UNKNOWN, row.architecture
        assert row.layers or row.refused or row.note, row.architecture


@reported
def test_nearly_all_text_generation_models_have_hook_points(
    rows: list[ArchitectureReport],
) -> None:
    text = [row for row in rows if row.table == "text"]
    assert sum(not row.refused for row in text) >= 0.95 * len(text)


@reported
def test_the_page_of_supported_models_is_up_to_date(
    rows: list[ArchitectureReport],
) -> None:
    path = HERE.parity_results
    results = json.loads(path.read_text()) if path.exists() else {}
    written = (HERE.root / "docs/reference/supported_models.md").read_text()
    assert written == page(rows, results), "run `make models`"


@reported
def test_each_decoder_is_compared_or_has_a_reason(
    rows: list[ArchitectureReport],
) -> None:
    results = json.loads(HERE.parity_results.read_text())
    known = {entry["architecture"] for entry in results.values()}
    decoders = [row for row in rows if row.table in ("text", "transformers")]
    tapped = {row.architecture for row in decoders if row.layers and not row.refused}
    assert len(tapped) > 120
    assert not tapped - known
