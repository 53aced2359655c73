# SPDX-License-Identifier: Apache-2.0
import pytest

from fork.language import replace
from fork.language.problems import AlreadyApplied, MissingAnchor, WrongCount
from tests.fork.language._weaving import assert_woven, only_problem, run


def test_an_expression_is_wrapped_with_its_source() -> None:
    assert_woven(
        "def f():\n    return a.b( 'x' )[0]\n",
        "def f():\n    return wrap(a.b( 'x' ), 1)[0]\n",
        replace(scope="f", anchor='a.b("x")', by="wrap($0, 1)", why="test"),
    )


def test_an_expression_over_several_lines_is_wrapped() -> None:
    assert_woven(
        "x = g(\n    a,\n    b,\n)\n",
        "x = wrap(g(\n    a,\n    b,\n))\n",
        replace(scope="", anchor="g(...)", by="wrap($0)", why="test"),
    )


def test_a_loose_result_keeps_its_meaning() -> None:
    assert_woven(
        "x = a * 2\n",
        "x = (a + b) * 2\n",
        replace(scope="", anchor="a", by="$0 + b", why="test"),
    )


def test_a_signature_belongs_to_its_function() -> None:
    assert_woven(
        "def f(a: int = 1):\n    return 1\n",
        "def f(a: float = 1):\n    return 1\n",
        replace(scope="f", anchor="int", by="float", why="test"),
    )


def test_names_of_keywords_and_attributes_are_no_expressions() -> None:
    assert_woven(
        "x = f(a=a).a\n",
        "x = f(a=b).a\n",
        replace(scope="", anchor="a", by="b", why="test"),
    )


def test_a_statement_is_replaced_and_keeps_its_comment() -> None:
    assert_woven(
        "def f():\n    # why\n    return x\n",
        "def f():\n    # why\n    y = 1\n    return x\n",
        replace(scope="f", anchor="return x", by="y = 1\n$0", why="test"),
    )


def test_the_count_holds_for_expressions() -> None:
    edit = replace(scope="", anchor="a", by="b", why="test")
    assert only_problem("x = a + a\n", edit).finding == WrongCount("", 2, 1)


def test_a_missing_expression_is_reported() -> None:
    edit = replace(scope="", anchor="a", by="b", why="test")
    assert only_problem("x = c\n", edit).finding == MissingAnchor("")


@pytest.mark.parametrize("by", ["wrap($0)", "other"])
def test_weaving_twice_fails(by: str) -> None:
    edit = replace(scope="f", anchor="a.b", by=by, why="test")
    once = run("def f():\n    return a.b\n", edit).source
    assert once is not None
    assert only_problem(once, edit).finding == AlreadyApplied("f")


def test_an_expression_takes_an_expression() -> None:
    with pytest.raises(ValueError, match="takes an expression"):
        replace(scope="", anchor="a", by="x = 1", why="test")
