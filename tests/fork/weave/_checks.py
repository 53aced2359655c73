# SPDX-License-Identifier: Apache-2.0
"""Checks that hold for the hook points of every woven layer, on toy numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from fork.weave.layer_class import LayerClass
from fork.weave.rules import Rule
from tests.fork.weave._toy import Layer, Neutral, Taps, methods, run

DELTA = 0.75


@dataclass(frozen=True)
class Subject:
    """One configuration in which a woven class is run."""

    source: str
    cls: LayerClass
    rule: Rule
    flags: Mapping[str, bool]
    truth: bool
    residual: float | None

    def layer(self, taps: Taps, **settings: Any) -> Layer:
        """The layer, with `taps` woven in."""
        names = methods(self.source, self.cls.name, taps, self.rule.inline)
        made = type(self.cls.name, (Layer,), names)(
            self.cls.builds, self._adds, self.rule.passing, self.truth
        )
        for text, outcome in self.flags.items():
            _set(made, text, outcome)
        for name, value in settings.items():
            setattr(made, name, value)
        return made

    def run(self, layer: Layer, hidden: float, taps: Taps) -> float:
        """Run the layer; returns the stream after it."""
        split = self.flags.get(self.rule.enters_split, False)
        return run(layer, hidden, self.residual, taps, split)

    def _adds(self, attribute: str) -> bool:
        return attribute in self.rule.adding or self.cls.norm_adds(attribute)


def subjects(source: str, cls: LayerClass, rule: Rule) -> Iterator[Subject]:
    """All cases of the rule, with other flags all false or all true, with residuals."""
    takes = "residual" in [p.name.value for p in cls.methods["forward"].params.params]
    residuals = (None, 0.5) if takes else (None,)
    for flags, truth, residual in itertools.product(
        rule.cases, (False, True), residuals
    ):
        looks = not rule.enters_split.startswith("self.")
        if looks and flags.get(rule.enters_split) and residual is None:
            continue  # excluded by the layer's own condition
        yield Subject(source, cls, rule, flags, truth, residual)


def _set(layer: Any, text: str, outcome: bool) -> None:
    """Set attributes so that `self.a.b` or `self.a == 2` has the given value."""
    path, _, number = text.partition(" == ")
    first, *inner = path.removeprefix("self.").split(".")
    if not path.startswith("self."):
        return
    if path.endswith((" is None", " is not None")):
        first = first.partition(" is ")[0]
        if outcome == path.endswith(" is None"):
            setattr(layer, first, None)
        return
    value: Any = outcome
    if number:
        value = int(number) if outcome else -1
    if inner:
        holder = layer.__dict__.setdefault(first, Neutral(layer.truth_))
        if not number or outcome:
            setattr(holder, inner[0], value)
    else:
        setattr(layer, first, value)


def check(subject: Subject) -> None:
    """Check that hook points read the stream, and that a change applies once."""
    base = Taps()
    layer = subject.layer(base)
    leaving = subject.run(layer, 0.3, base)
    entering = 0.3 + (subject.residual or 0.0) * base.paired["pre_attn"]
    near = pytest.approx
    assert base.seen["pre_attn"] == near(entering)
    assert base.seen["post_block"] == near(leaving)
    if not subject.rule.several_mixers:
        mixed = base.seen["post_attn"] - base.seen["pre_attn"]
        assert mixed == near(sum(layer.mixed_))
    before_mlp = 1 if subject.rule.several_mixers else len(layer.mixed_)
    _check_changes(subject, base, leaving, before_mlp - 1)
    silent = Taps()
    if not subject.rule.several_mixers:
        subject.run(subject.layer(silent, mlp_scale_=0.0), 0.3, silent)
        assert silent.seen["post_block"] == near(silent.seen["post_attn"])


def _check_changes(
    subject: Subject, base: Taps, leaving: float, last_mixer: int
) -> None:
    expected: dict[str, Callable[[Taps], float]] = {
        "pre_attn": lambda taps: subject.run(subject.layer(taps), 0.3 + DELTA, taps),
        "post_attn": lambda taps: subject.run(
            subject.layer(taps, boost_=DELTA, boosted_=last_mixer), 0.3, taps
        ),
        "post_block": lambda taps: leaving + DELTA,
    }
    for point, reference in expected.items():
        silent = Taps()
        wanted = reference(silent)
        if point == "post_attn" and base.seen["post_attn"] == base.seen["pre_attn"]:
            continue  # there is no token mixer whose output could be changed instead
        for replaces in (False, True):
            taps = Taps({point: DELTA}, replaces)
            got = subject.run(subject.layer(taps), 0.3, taps)
            assert got == pytest.approx(wanted), (point, replaces)
            assert taps.seen[point] == pytest.approx(base.seen[point])
