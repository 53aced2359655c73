# SPDX-License-Identifier: Apache-2.0
"""Parameters, arguments, fields, decorators and imports."""

import pytest

from fork.language import (
    Edit,
    add_argument,
    add_decorator,
    add_field,
    add_import,
    add_parameter,
)
from fork.language.problems import AlreadyApplied, Moved, Unfit, WrongCount
from tests.fork.language._weaving import assert_woven, only_problem, run

NEW = "c: int | None = None"


@pytest.mark.parametrize(
    ("before", "after", "behind"),
    [
        ("f()", "f(c: int | None = None)", None),
        ("f(a, b=1)", "f(a, b=1, c: int | None = None)", None),
        ("f(a, **k)", "f(a, c: int | None = None, **k)", None),
        ("f(*a, **k)", "f(*a, c: int | None = None, **k)", None),
        ("f(a, *, b)", "f(a, *, b, c: int | None = None)", None),
        ("f(a=0, b=1)", "f(a=0, c: int | None = None, b=1)", "a"),
        ("f(a, /, b=1)", "f(a, /, b=1, c: int | None = None)", "b"),
        ("f(a, *r, b)", "f(a, *r, c: int | None = None, b)", "r"),
        (
            "f(\n    a,  # first\n    # about b\n    b=1,  # second\n)",
            (
                "f(\n    a,  # first\n    # about b\n    b=1,  # second\n"
                "    c: int | None = None,\n)"
            ),
            None,
        ),
        (
            "f(\n    a=0,  # first\n    # about b\n    b=1,  # second\n)",
            (
                "f(\n    a=0,  # first\n    c: int | None = None,\n    # about b\n"
                "    b=1,  # second\n)"
            ),
            "a",
        ),
        ("f(\n    a\n)", "f(\n    a,\n    c: int | None = None\n)", None),
    ],
)
def test_a_parameter_follows_the_layout(
    before: str, after: str, behind: str | None
) -> None:
    edit = add_parameter(scope="f", parameter=NEW, after=behind, why="test")
    body = ":\n    pass\n"
    assert_woven(f"def {before}{body}", f"def {after}{body}", edit)


def test_a_parameter_that_is_there_is_already_applied() -> None:
    edit = add_parameter(scope="f", parameter=NEW, why="test")
    problem = only_problem("def f(*, c=1):\n    pass\n", edit)
    assert problem.finding == AlreadyApplied("f")


def test_the_parameter_to_follow_must_exist() -> None:
    edit = add_parameter(scope="f", parameter=NEW, after="z", why="test")
    problem = only_problem("def f(a):\n    pass\n", edit)
    assert problem.finding == Unfit('"f" has no parameter "z"')


def test_a_parameter_without_default_behind_one_with_default_is_a_problem() -> None:
    edit = add_parameter(scope="f", parameter="c", why="test")
    problem = only_problem("def f(a=1):\n    pass\n", edit)
    assert isinstance(problem.finding, Unfit)
    assert "without defaults following" in problem.sentence()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("g()", "g(c=c)"),
        ("g(a, b=1)", "g(a, b=1, c=c)"),
        ("g(a, **k)", "g(a, c=c, **k)"),
        ("g(\n    a,\n)", "g(\n    a,\n    c=c,\n)"),
        ("g(\n    a, b\n)", "g(\n    a, b, c=c\n)"),
    ],
)
def test_an_argument_follows_the_layout(before: str, after: str) -> None:
    edit = add_argument(scope="f", call="g", argument="c=c", why="test")
    assert_woven(f"def f():\n    {before}\n", f"def f():\n    {after}\n", edit)


def test_only_calls_of_the_callee_get_the_argument() -> None:
    edit = add_argument(scope="", call="self.g", argument="c=c", why="test")
    assert_woven(
        "x = [self.g(1), g(2), self.h.g(3)]\n",
        "x = [self.g(1, c=c), g(2), self.h.g(3)]\n",
        edit,
    )


def test_nested_calls_are_both_changed() -> None:
    edit = add_argument(scope="", call="g", argument="c=c", why="test", count=2)
    assert_woven("g(g(1))\n", "g(g(1, c=c), c=c)\n", edit)


def test_calls_in_an_inner_function_belong_to_it() -> None:
    edit = add_argument(scope="", call="g", argument="c=c", why="test")
    problem = only_problem("def f():\n    g()\n", edit)
    assert problem.finding == Moved("", ("f",))


CLASS = '''\
class A:
    x: int = 0
    """About x."""
    y: int = 1
'''


def test_a_field_goes_below_the_docstring_of_the_one_before() -> None:
    edit = add_field(
        scope="A", after="x", insert='c: int = 2\n"""About c."""', why="test"
    )
    above = '"""About x."""\n'
    added = f'{above}    c: int = 2\n    """About c."""\n'
    assert_woven(CLASS, CLASS.replace(above, added), edit)


def test_the_field_to_follow_must_exist() -> None:
    edit = add_field(scope="A", after="z", insert="c: int = 2", why="test")
    assert only_problem(CLASS, edit).finding == Unfit('"A" has no field "z"')


def test_a_decorator_goes_on_top() -> None:
    edit = add_decorator(scope="A", decorator="@d(1)", why="test")
    assert_woven(f"@e\n{CLASS}", f"@d(1)\n@e\n{CLASS}", edit)


def test_an_import_goes_below_the_last_one() -> None:
    edit = add_import("from a import b", why="test")
    assert_woven(
        "import os\n\nimport sys\n\nx = 1\n\nif x:\n    import re\n",
        "import os\n\nimport sys\nfrom a import b\n\nx = 1\n\nif x:\n    import re\n",
        edit,
    )


def test_a_module_without_imports_gets_one_on_top() -> None:
    assert_woven(
        '"""Doc."""\nx = 1\n',
        '"""Doc."""\nimport a\nx = 1\n',
        add_import("import a", why="test"),
    )


def test_an_import_among_others_is_already_applied() -> None:
    edit = add_import("from a import b", why="test")
    problem = only_problem("from a import (\n    c,\n    b,\n)\n", edit)
    assert problem.finding == AlreadyApplied("")


def test_the_same_name_from_elsewhere_is_another_import() -> None:
    source = "from z import b as q\nfrom a import c\n"
    assert_woven(
        source, source + "from a import b\n", add_import("from a import b", why="test")
    )


@pytest.mark.parametrize(
    "edit",
    [
        add_parameter(scope="A.f", parameter=NEW, why="test"),
        add_argument(scope="A.f", call="g", argument="c=c", why="test"),
        add_field(scope="A", after="x", insert="c: int = 2", why="test"),
        add_decorator(scope="A", decorator="d", why="test"),
        add_import("import a", why="test"),
    ],
    ids=lambda edit: type(edit).__name__,
)
def test_weaving_twice_fails(edit: Edit) -> None:
    source = CLASS + "\n    def f(self):\n        return g(self)\n"
    once = run(source, edit).source
    assert once is not None
    assert isinstance(only_problem(once, edit).finding, AlreadyApplied)


def test_two_classes_of_one_name_are_refused() -> None:
    edit = add_decorator(scope="A", decorator="d", why="test")
    assert only_problem(CLASS + CLASS, edit).finding == WrongCount("A", 2, 1)


def test_an_argument_needs_a_keyword() -> None:
    with pytest.raises(ValueError, match="name=value"):
        add_argument(scope="", call="g", argument="c", why="test")
