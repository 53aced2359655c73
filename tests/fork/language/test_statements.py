# SPDX-License-Identifier: Apache-2.0
"""Statements, fields, imports and decorators are inserted at their places."""

import pytest

from fork.language import (
    Edit,
    add_base,
    add_decorator,
    add_field,
    add_import,
    after,
    before,
    first,
    last,
)
from tests.fork.language._weaving import (
    assert_woven,
    only_fault,
    run,
)

LOOP = """\
    class Engine:
        def step(self, items):
            # how many
            total = 0

            for item in items:
                total += cost(item,
                              'eur',  # currency
                              )
            return total
    """


def test_after_inserts_below_a_nested_statement_whatever_its_layout() -> None:
    assert_woven(
        LOOP,
        """\
        class Engine:
            def step(self, items):
                # how many
                total = 0

                for item in items:
                    total += cost(item,
                                  'eur',  # currency
                                  )
                    seen(item)
                    if item:
                        log(item)
                return total
        """,
        after(
            scope="Engine.step",
            anchor='total += cost(item, "eur")',
            insert="""
                seen(item)
                if item:
                    log(item)
            """,
            why="test",
        ),
    )


def test_before_takes_the_blank_lines_and_leaves_the_comment() -> None:
    assert_woven(
        """\
        def f():
            a = 1

            # about b
            b = 2
        """,
        """\
        def f():
            a = 1

            # ours
            hook()
            # about b
            b = 2
        """,
        before(scope="f", anchor="b = 2", insert="# ours\nhook()", why="test"),
    )


def test_edits_at_one_place_keep_their_order() -> None:
    assert_woven(
        "x = 1\n",
        "p()\nq()\nx = 1\nr()\ns()\n",
        before(scope="", anchor="x = 1", insert="p()", why="test"),
        after(scope="", anchor="x = 1", insert="r()", why="test"),
        before(scope="", anchor="x = 1", insert="q()", why="test"),
        after(scope="", anchor="x = 1", insert="s()", why="test"),
    )


def test_edits_do_not_see_each_other() -> None:
    assert_woven(
        "x = 1\n",
        "x = 1\ny = 2\nz = 3\n",
        after(scope="", anchor="x = 1", insert="y = 2\nz = 3", why="test"),
    )
    fault = only_fault(
        "x = 1\n",
        after(scope="", anchor="x = 1", insert="y = 2", why="test"),
        after(scope="", anchor="y = 2", insert="z = 3", why="test"),
    )
    assert fault.kind == "MissingAnchor"


def test_a_header_matches_without_its_body() -> None:
    assert_woven(
        "for a in b:\n    use(a)\nelse:\n    pass\n",
        "for a in b:\n    use(a)\nelse:\n    pass\ndone()\n",
        after(scope="", anchor="for a in b:", insert="done()", why="test"),
    )


def test_several_statements_tell_equal_ones_apart() -> None:
    assert_woven(
        "a()\nb()\na()\nc()\n",
        "a()\nb()\na()\nc()\nd()\n",
        after(scope="", anchor="a()\nc()", insert="d()", why="test"),
    )


def test_strings_and_crlf_around_the_edit_stay_byte_for_byte() -> None:
    source = "x = 1\r\ny = '''a\r\n\tb'''\r\nz = 3  \r\n"
    woven = run(source, after(scope="", anchor="x = 1", insert="w = 2", why="test"))
    assert woven.source == source.replace("x = 1\r\n", "x = 1\r\nw = 2\r\n")


@pytest.mark.parametrize("scope", ["f", ""])
def test_an_anchor_in_another_scope_is_reported_as_moved(scope: str) -> None:
    fault = only_fault(
        "def f():\n    pass\n\nclass C:\n    def g(self):\n        x = 1\n",
        after(scope=scope, anchor="x = 1", insert="y = 2", why="test"),
    )
    assert fault.kind == "Moved"
    assert 'it is now in scope "C.g"' in fault.sentence


def test_an_inner_function_is_a_scope_of_its_own() -> None:
    source = "def f():\n    def inner():\n        x = 1\n    return inner\n"
    edit = after(scope="f", anchor="x = 1", insert="y = 2", why="test")
    assert only_fault(source, edit).kind == "Moved"
    inner = after(scope="f.inner", anchor="x = 1", insert="y = 2", why="test")
    assert "        x = 1\n        y = 2\n" in (run(source, inner).source or "")


def test_more_matches_than_expected_are_refused() -> None:
    edit = after(scope="", anchor="a()", insert="b()", why="test")
    assert only_fault("a()\na()\n", edit).kind == "WrongCount"


def test_fewer_matches_than_expected_are_refused() -> None:
    edit = after(scope="", anchor="a()", insert="b()", why="test", count=2)
    assert only_fault("a()\n", edit).kind == "WrongCount"


def test_an_expected_count_of_two_edits_both() -> None:
    edit = after(scope="", anchor="a()", insert="b()", why="test", count=2)
    assert_woven("a()\na()\n", "a()\nb()\na()\nb()\n", edit)


CLASS = '''\
class A:
    """Doc."""

    x: int = 0
    """About x."""
    y: int = 1

    def f(self):
        """Doc."""
        # what
        return 1
'''


@pytest.mark.parametrize(
    ("edit", "old", "new"),
    [
        (
            first(scope="A.f", insert="hook()", why="test"),
            "        # what\n",
            "        hook()\n        # what\n",
        ),
        (
            last(scope="A", insert="def g(self):\n    return 2", why="test"),
            "        return 1\n",
            "        return 1\n\n    def g(self):\n        return 2\n",
        ),
        (
            add_field(
                scope="A",
                after="x",
                insert='c: int = 2\n"""One\nand two."""',
                why="test",
            ),
            "    y: int",
            '    c: int = 2\n    """One\nand two."""\n    y: int',
        ),
        (
            add_decorator(scope="A", decorator="@d(1)", why="test"),
            "class",
            "@d(1)\nclass",
        ),
        (add_base(scope="A", base="B", why="test"), "class A:", "class A(B):"),
    ],
    ids=lambda edit: getattr(edit, "operation", ""),
)
def test_a_class_gets_its_additions_where_they_belong(
    edit: Edit, old: str, new: str
) -> None:
    source = f"@e\n{CLASS}"
    expected = source.replace(old, new, 1)
    if edit.operation == "add_decorator":
        expected = f"@d(1)\n{source}"
    assert_woven(source, expected, edit)


@pytest.mark.parametrize(
    ("before", "after", "edit"),
    [
        (
            '"""Doc."""\nfrom __future__ import annotations\nx = 1\n',
            '"""Doc."""\nfrom __future__ import annotations\ny = 2\nx = 1\n',
            first(scope="", insert="y = 2", why="test"),
        ),
        (
            "import os\n\nimport sys\n\nif x:\n    import re\n",
            "import os\n\nimport sys\nfrom a import b\n\nif x:\n    import re\n",
            add_import("from a import b", why="test"),
        ),
        (
            '"""Doc."""\nx = 1\n',
            '"""Doc."""\nimport a\nx = 1\n',
            add_import("import a", why="test"),
        ),
    ],
)
def test_a_module_gets_its_additions_on_top(
    before: str, after: str, edit: Edit
) -> None:
    assert_woven(before, after, edit)


def test_inner_and_outer_ends_at_one_place_keep_their_blocks() -> None:
    assert_woven(
        "def f():\n    if a:\n        b()\n",
        "def f():\n    if a:\n        b()\n        c()\n    d()\ne()\n",
        after(scope="", anchor="def f(...):", insert="e()", why="test"),
        after(scope="f", anchor="if a:", insert="d()", why="test"),
        after(scope="f", anchor="b()", insert="c()", why="test"),
    )


def test_an_elif_is_no_statement_of_its_own() -> None:
    edit = before(scope="", anchor="if b:", insert="x()", why="test")
    source = "if a:\n    pass\nelif b:\n    pass\n"
    assert only_fault(source, edit).kind == "MissingAnchor"


@pytest.mark.parametrize("source", ["def f(): ...\n", "def f():\n    a(); x = 1\n"])
def test_a_statement_that_shares_its_line_is_refused(source: str) -> None:
    edit = first(scope="f", insert="hook()", why="test")
    if "x" in source:
        edit = before(scope="f", anchor="x = 1", insert="hook()", why="test")
    assert only_fault(source, edit).kind == "Unfit"


def test_a_missing_scope_names_where_the_name_went() -> None:
    fault = only_fault(CLASS, first(scope="B.f", insert="x()", why="test"))
    assert fault.kind == "MissingScope"
    assert "moved? the name is defined as A.f" in fault.sentence


def test_two_definitions_of_one_name_count_twice() -> None:
    source = "if a:\n    def f():\n        x()\nelse:\n    def f():\n        y()\n"
    edit = first(scope="f", insert="hook()", why="test")
    assert only_fault(source, edit).kind == "WrongCount"


def test_the_field_to_follow_must_exist() -> None:
    edit = add_field(scope="A", after="z", insert="c: int = 2", why="test")
    assert 'no field "z"' in only_fault(CLASS, edit).sentence


def test_mistakes_in_an_edit_are_refused() -> None:
    with pytest.raises(ValueError, match="not an import"):
        add_import("x = 1", why="test")
    with pytest.raises(ValueError, match="declares no field"):
        add_field(scope="A", after="x", insert="f()", why="test")


def test_a_reason_is_required() -> None:
    with pytest.raises(ValueError, match="why=''"):
        after(scope="", anchor="x", insert="y", why=" ")
