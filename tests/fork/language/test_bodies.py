# SPDX-License-Identifier: Apache-2.0
import pytest

from fork.language import first, last
from fork.language.problems import AlreadyApplied, MissingScope, WrongCount
from tests.fork.language._weaving import assert_woven, only_problem, run

CLASS = '''\
class A:
    """Doc."""

    x: int = 0

    def f(self):
        """Doc."""
        return 1
'''


def test_first_goes_below_the_docstring() -> None:
    expected = CLASS.replace("        return 1\n", "        hook()\n        return 1\n")
    assert_woven(CLASS, expected, first(scope="A.f", insert="hook()", why="test"))


def test_last_of_a_class_sets_a_method_apart() -> None:
    assert_woven(
        CLASS,
        CLASS + "\n    def g(self):\n        return 2\n",
        last(scope="A", insert="def g(self):\n    return 2", why="test"),
    )


def test_first_of_a_module_goes_below_future_imports() -> None:
    assert_woven(
        '"""Doc."""\nfrom __future__ import annotations\nx = 1\n',
        '"""Doc."""\nfrom __future__ import annotations\ny = 2\nx = 1\n',
        first(scope="", insert="y = 2", why="test"),
    )


BRANCHES = """\
try:
    if a:
        b()
    elif c:
        d()
    else:
        e()
except KeyError:
    f()
finally:
    g()
"""


@pytest.mark.parametrize(
    ("anchor", "body"),
    [
        ("if a:", "        b()\n"),
        ("elif c:", "        d()\n"),
        ("else:", "        e()\n"),
        ("except KeyError:", "    f()\n"),
        ("finally:", "    g()\n"),
    ],
)
def test_each_clause_has_a_body_of_its_own(anchor: str, body: str) -> None:
    indent = " " * (len(body) - len(body.lstrip()))
    hook = f"{indent}hook()\n"
    above = first(scope="", anchor=anchor, insert="hook()", why="test")
    below = last(scope="", anchor=anchor, insert="hook()", why="test")
    assert_woven(BRANCHES, BRANCHES.replace(body, hook + body), above)
    assert_woven(BRANCHES, BRANCHES.replace(body, body + hook), below)


def test_a_body_on_the_header_line_is_opened() -> None:
    assert_woven(
        "def f(): ...\n",
        "def f():\n    hook()\n    ...\n",
        first(scope="f", insert="hook()", why="test"),
    )


def test_a_missing_scope_names_where_the_name_went() -> None:
    problem = only_problem(CLASS, first(scope="B.f", insert="x()", why="test"))
    assert problem.finding == MissingScope("B.f", ("A.f",))
    assert "moved? the name is defined as A.f" in problem.sentence()


def test_two_definitions_of_one_name_count_twice() -> None:
    source = "if a:\n    def f():\n        x()\nelse:\n    def f():\n        y()\n"
    edit = first(scope="f", insert="hook()", why="test")
    assert only_problem(source, edit).finding == WrongCount("f", 2, 1)
    both = first(scope="f", insert="hook()", why="test", count=2)
    assert (run(source, both).source or "").count("hook()") == 2


@pytest.mark.parametrize("end", [first, last])
def test_weaving_twice_fails(end) -> None:
    edit = end(scope="A.f", insert="hook()", why="test")
    once = run(CLASS, edit).source
    assert once is not None
    assert only_problem(once, edit).finding == AlreadyApplied("A.f")


def test_first_needs_a_header() -> None:
    with pytest.raises(ValueError, match="colon"):
        first(scope="", anchor="x = 1", insert="y()", why="test")
