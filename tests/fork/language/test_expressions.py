# SPDX-License-Identifier: Apache-2.0
"""Expressions are replaced; parameters and arguments continue a list's layout."""

import pytest

from fork.language import add_argument, add_parameter, replace
from tests.fork.language._weaving import assert_woven, only_fault

NEW = "c: int | None = None"


@pytest.mark.parametrize(
    ("before", "after", "anchor", "by"),
    [
        ("x = g( 'a' )[0]", "x = h(1)[0]", 'g("a")', "h(1)"),
        ("x = g(\n    a,\n    b,\n)", "x = h()", "g(...)", "h()"),
        ("x = a * 2", "x = (a + b) * 2", "a", "a + b"),
        ("x = f(a=a).a", "x = f(a=b).a", "a", "b"),
        ("é = 'é', a", "é = 'é', b", "a", "b"),
        (
            "if a:\n    x = b",
            "if a:\n    x = f(\n        c\n    )",
            "b",
            "f(\n    c\n)",
        ),
    ],
)
def test_an_expression_is_replaced(
    before: str, after: str, anchor: str, by: str
) -> None:
    edit = replace(scope="", anchor=anchor, by=by, why="test")
    assert_woven(f"{before}\n", f"{after}\n", edit)


def test_a_signature_belongs_to_its_function() -> None:
    edit = replace(scope="f", anchor="int", by="float", why="test")
    assert_woven("def f(a: int): pass\n", "def f(a: float): pass\n", edit)


@pytest.mark.parametrize(
    ("source", "kind"), [("x = a + a", "WrongCount"), ("x = c", "MissingAnchor")]
)
def test_an_expression_matches_as_often_as_it_says(source: str, kind: str) -> None:
    edit = replace(scope="", anchor="a", by="b", why="test")
    assert only_fault(f"{source}\n", edit).kind == kind


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("f()", "f(c: int | None = None)"),
        ("f(a, b=1)", "f(a, b=1, c: int | None = None)"),
        ("f(a, **k)", "f(a, c: int | None = None, **k)"),
        ("f(*a, **k)", "f(*a, c: int | None = None, **k)"),
        ("f(a, *, b)", "f(a, *, b, c: int | None = None)"),
        (
            "f(\n    a,  # first\n    # about b\n    b=1,  # second\n)",
            (
                "f(\n    a,  # first\n    # about b\n    b=1,  # second\n"
                "    c: int | None = None,\n)"
            ),
        ),
        ("f(\n    a\n)", "f(\n    a,\n    c: int | None = None\n)"),
    ],
)
def test_a_parameter_follows_the_layout(before: str, after: str) -> None:
    edit = add_parameter(scope="f", parameter=NEW, why="test")
    body = ":\n    pass\n"
    assert_woven(f"def {before}{body}", f"def {after}{body}", edit)


@pytest.mark.parametrize(
    ("source", "parameter", "says"),
    [("*, c=1", NEW, "duplicate argument"), ("a=1", "c", "follows default")],
)
def test_a_parameter_that_cannot_be_there_is_refused(
    source: str, parameter: str, says: str
) -> None:
    edit = add_parameter(scope="f", parameter=parameter, why="test")
    assert says in only_fault(f"def f({source}):\n    pass\n", edit).sentence


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("g()", "g(c=c)"),
        ("g(a, b=1)", "g(a, b=1, c=c)"),
        ("g(a, b=(1))", "g(a, b=(1), c=c)"),
        ("g(a, **k)", "g(a, c=c, **k)"),
        ("g(\n    a,\n)", "g(\n    a,\n    c=c,\n)"),
    ],
)
def test_an_argument_follows_the_layout(before: str, after: str) -> None:
    edit = add_argument(scope="f", call="g", argument="c=c", why="test")
    assert_woven(f"def f():\n    {before}\n", f"def f():\n    {after}\n", edit)


@pytest.mark.parametrize(
    ("before", "after", "call", "count"),
    [
        ("x = [a.g(1), g(2)]\n", "x = [a.g(1, c=c), g(2)]\n", "a.g", 1),
        ("g(g(1))\n", "g(g(1, c=c), c=c)\n", "g", 2),
    ],
)
def test_only_calls_of_the_callee_get_the_argument(
    before: str, after: str, call: str, count: int
) -> None:
    edit = add_argument(scope="", call=call, argument="c=c", why="test", count=count)
    assert_woven(before, after, edit)


def test_mistakes_in_an_edit_are_refused() -> None:
    with pytest.raises(ValueError, match="name=value"):
        add_argument(scope="", call="g", argument="c", why="test")
    with pytest.raises(ValueError, match="not an expression"):
        replace(scope="", anchor="a", by="x = 1", why="test")
