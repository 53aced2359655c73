# SPDX-License-Identifier: Apache-2.0
"""Inserts hook points into every decoder layer of a module and proves the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import libcst as cst

from .added_points import (
    ADDED_POINTS,
    ATTN_ADD,
    MLP_ADD,
    is_partial,
    place_added,
    prove_added,
    stream_behind,
)
from .events import Trace
from .finding import decoder_layers, may_hold_layers
from .insertion import decorator, insert, members
from .interpreter import paths
from .layer_class import LayerClass, Module
from .mlp_points import MLP_POINTS, place_mlp, prove_mlp
from .placement import BLOCK, POST, PRE, Site, anchored, final_terms, place
from .proof import prove
from .rules import NOT_TAPPED, REFUSED, RULES, Rule, Sometimes
from .several_streams import (
    NO_SUM,
    SEVERAL,
    SINGLE,
    STREAMS,
    STREAMS_POST,
    STREAMS_PRE,
    prove_streams,
)
from .stream import Role, Unprovable, sublayers

_NO_RULE = Rule(reason="")
_ORDER = (
    *(STREAMS_PRE, PRE, ATTN_ADD, POST),
    *(*MLP_POINTS, MLP_ADD, BLOCK, STREAMS_POST),
)
"""The points in the order of the forward pass."""
_ADVICE = "add a rule or a refusal in rules.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A decoder-layer class: its hook points, or why it has none."""

    name: str
    module: str = ""
    """The file that defines it, in a report about an architecture."""
    points: tuple[str, ...] = ()
    refused: str = ""
    """Why it has none; empty if it has some."""
    is_layer: bool = True
    """False for a class that only looks like a layer of a language model."""
    rule: str = ""
    """Why the analysis needed a rule; empty if it did not."""
    inherits: str = ""
    """The base class whose woven `forward` it runs, if it has none of its own."""
    unless: tuple[str, ...] = ()
    """Reasons for which individual layers are refused at start-up."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """The optional points that it does not have, each with the reason."""
    partial: tuple[str, ...] = ()
    """The points that it has with one tensor-parallel rank only."""
    sometimes: Mapping[str, str] = field(default_factory=dict)
    """The points that only some layers have, each with the reason of the others."""
    meaning: str = ""
    """The meaning of `post_attn` in a block without a token mixer or without an MLP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeaveResult:
    """The result of weaving one module."""

    source: str | None = None
    """The woven source; None if nothing changed."""
    problems: tuple[str, ...] = ()
    """Sentences about decoder layers that cannot be woven; they fail the build."""
    layers: tuple[Layer, ...] = ()
    """Those with hook points."""
    refused: tuple[Layer, ...] = ()


def weave_module(source: str, module: str) -> WeaveResult:
    """Insert hook points into the decoder layers that `source` defines.

    Args:
        source: the module's source text.
        module: its path in the wheel, such as `vllm/model_executor/models/llama.py`.

    """
    where = module.removeprefix("vllm/").removesuffix(".py")
    ruled = [key.split(":")[1] for key in RULES if key.startswith(f"{where}:")]
    if not ruled and not may_hold_layers(source):
        return WeaveResult()
    found = decoder_layers(source)
    names = [*found, *(name for name in ruled if name not in found)]
    refused = tuple(_refusals(names, where))
    names = [name for name in names if name not in {r.name for r in refused}]
    if not names:
        return WeaveResult(refused=refused)
    rules = {name: RULES.get(f"{where}:{name}", _NO_RULE) for name in names}
    result = weave_classes(source, rules)
    problems = tuple(f"{text}; {_ADVICE}" for text in result.problems)
    return replace(result, refused=refused, problems=problems)


def _refusals(names: list[str], where: str) -> list[Layer]:
    return [
        Layer(name=name, refused=table[key], is_layer=table is REFUSED)
        for table in (REFUSED, NOT_TAPPED)
        for name in names
        if (key := f"{where}:{name}") in table
    ]


def weave_classes(source: str, rules: Mapping[str, Rule]) -> WeaveResult:
    """Insert hook points into given classes of `source`.

    Args:
        source: the module's source text.
        rules: by name of the class: its rule, which may be empty.

    """
    parsed = Module(cst.parse_module(source))
    plans, problems = [], []
    for name, rule in rules.items():
        try:
            plans.append(_plan(parsed, name, rule))
        except Unprovable as error:
            problems.append(f"{name}: {error}")
    woven = _woven(parsed, plans)
    for plan in plans:
        try:
            for form in plan.forms:  # Taps of the others are not attached.
                _prove(_woven(parsed, [form]), form)
            if not plan.forms:
                _prove(woven, plan)
        except Unprovable as error:
            problems.append(f"{plan.name}: woven, but {error}")
    changed = woven is not parsed and not problems
    return WeaveResult(
        source=woven.tree.code if changed else None,
        problems=tuple(problems),
        layers=tuple(plan.described() for plan in plans),
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    """The calls to insert into one class."""

    cls: LayerClass
    rule: Rule
    sites: tuple[Site, ...]
    lacks: Mapping[str, str] = field(default_factory=dict)
    partial: tuple[str, ...] = ()
    meaning: str = ""
    forms: tuple[_Plan, ...] = ()
    """The plans of which this one is made, each for other configurations."""

    @property
    def name(self) -> str:
        return self.cls.name

    def points(self) -> tuple[str, ...]:
        if self.forms:
            return tuple(dict.fromkeys(p for one in self.forms for p in one.points()))
        placed = {site.point for site in self.sites}
        optional = (*MLP_POINTS, *ADDED_POINTS)
        return self.rule.points + tuple(p for p in optional if p in placed)

    def described(self) -> Layer:
        own = "forward" in self.cls.methods
        return Layer(
            name=self.name,
            points=self.points(),
            rule=self.rule.reason,
            inherits="" if own else self.cls.bases[0],
            unless=tuple(self.rule.unless.values()),
            lacks=self.lacks,
            partial=self.partial,
            sometimes={
                point: one.why for one in self.rule.sometimes for point in one.points
            },
            meaning=self.meaning,
        )


def _plan(parsed: Module, name: str, rule: Rule) -> _Plan:
    if name not in parsed.classes:
        raise Unprovable("there is a rule for it, but no such class")
    cls = parsed.classes[name]
    if "forward" not in cls.methods:
        return _Plan(cls, rule, ())
    if rule.otherwise is not None:
        return _either(parsed, name, rule, *rule.otherwise)
    if rule.streams:
        lacks = dict.fromkeys(ADDED_POINTS, NO_SUM)
        plan = _Plan(cls, rule, tuple(anchored(cls, rule.anchors)), lacks)
        traces = _traces(cls, rule)
        return _with(plan, parsed, MLP_POINTS, lambda early: place_mlp(traces, early))
    traces = _traces(cls, rule)
    meaning = _meaning(traces) if rule.proven else ""
    plan = _Plan(cls, rule, _sites(cls, rule, traces), meaning=meaning)
    of_mlp = _traces(cls, rule, MLP_POINTS[0])
    plan = _with(plan, parsed, MLP_POINTS, lambda early: place_mlp(of_mlp, early))
    for point in ADDED_POINTS:
        place = partial(place_added, _traces(cls, rule, point), point)
        plan = _with(plan, parsed, (point,), place)
    return plan


def _either(parsed: Module, name: str, rule: Rule, met: str, several: Rule) -> _Plan:
    """The plan of a layer with one stream, or with several where `met` is true."""
    one = _plan(parsed, name, replace(rule, otherwise=None))
    other = _plan(parsed, name, several)
    absent = tuple(p for p in one.points() if p not in other.points())
    few = (
        Sometimes(points=absent, cases={}, lacking=met, why=SEVERAL),
        Sometimes(points=STREAMS, cases={}, lacking=f"not {met}", why=SINGLE),
    )
    streams = f"{several.streams} if {met} else 0"
    return replace(
        one,
        rule=replace(rule, sometimes=(*rule.sometimes, *few), streams=streams),
        sites=(*one.sites, *other.sites),
        forms=(one, other),
    )


def _with(
    plan: _Plan,
    parsed: Module,
    points: tuple[str, ...],
    place: Callable[[bool], list[Site]],
) -> _Plan:
    """The plan with optional points, or with the reason why the layer lacks them."""
    reason = ""
    by_hand = {anchor.point for anchor in plan.rule.anchors}
    for early in (False, True):
        try:
            fresh = [] if by_hand >= {*points} else place(early)
            added = replace(plan, sites=(*plan.sites, *fresh))
            traces = _prove(_woven(parsed, [added]), added)
        except Unprovable as error:
            reason = reason or str(error)
        else:
            summed_later = [
                p for p in points if p != MLP_POINTS[0] and is_partial(traces, p)
            ]
            return replace(added, partial=(*plan.partial, *summed_later))
    return replace(plan, lacks={**plan.lacks, **dict.fromkeys(points, reason)})


def _meaning(traces: list[Trace]) -> str:
    """The meaning of `post_attn` if no path has a token mixer, or none an MLP."""
    kinds = {k for t in traces for x in final_terms(t) for k in sublayers(x)}
    if Role.MIXER not in kinds and Role.MLP in kinds:
        return "no token mixer in the block: post_attn is the stream at pre_attn"
    if Role.MLP not in kinds and Role.MIXER in kinds:
        return "no MLP in the block: post_attn is the stream at post_block"
    return ""


def _woven(parsed: Module, plans: list[_Plan]) -> Module:
    own = [plan for plan in plans if plan.sites]
    if not own:
        return parsed
    sites = [
        replace(
            site,
            run=plan.rule.run,
            split_when=plan.rule.split.get(stream_behind(site.point), ""),
        )
        for plan in own
        for site in sorted(plan.sites, key=lambda site: _ORDER.index(site.point))
    ]
    records = {
        plan.cls.node: (decorator(plan.points(), plan.partial), members(plan.rule))
        for plan in own
    }
    return Module(insert(parsed.tree, sites, records))


def _prove(woven: Module, plan: _Plan) -> list[Trace]:
    if not plan.sites:
        return []
    points = plan.points()
    cls = woven.classes[plan.name]
    traces = _traces(cls, plan.rule)
    if plan.rule.streams:
        for trace in traces:
            prove_streams(trace)
    elif plan.rule.proven:
        for trace in traces:
            prove(trace, several_mixers=plan.rule.several_mixers)
    if set(MLP_POINTS) <= set(points):
        for trace in _traces(cls, plan.rule, MLP_POINTS[0], traces):
            prove_mlp(trace)
    for point in (point for point in ADDED_POINTS if point in points):
        for trace in _traces(cls, plan.rule, point, traces):
            prove_added(trace, point)
    return traces


def _traces(
    cls: LayerClass, rule: Rule, point: str = "", known: list[Trace] | None = None
) -> list[Trace]:
    """The paths on which a point is proven; those of all points, if not fewer."""
    more = rule.assumed(point)
    if known is not None and not more:
        return known
    return [
        trace for case in rule.cases for trace in paths(cls, rule, {**case, **more})
    ]


def _sites(cls: LayerClass, rule: Rule, traces: list[Trace]) -> tuple[Site, ...]:
    by_hand = anchored(cls, rule.anchors)
    wanted = set(rule.points) - {site.point for site in by_hand}
    if not wanted:
        return tuple(by_hand)
    placed = place(traces, cls.methods["forward"], wanted)
    return (*_conditional(placed, rule), *by_hand)


def _conditional(sites: list[Site], rule: Rule) -> list[Site]:
    found = []
    for site in sites:
        if site.point in rule.partial_when:
            condition = rule.partial_when[site.point]
            found.append(replace(site, method="pair", condition=condition))
        elif site.point == BLOCK:
            found.append(replace(site, then=rule.last))
        else:
            found.append(replace(site, then=rule.first if site.is_first else ()))
    return found
