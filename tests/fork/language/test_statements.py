# SPDX-License-Identifier: Apache-2.0
import pytest

from fork.language import after, before
from fork.language.problems import AlreadyApplied, MissingAnchor, Moved, WrongCount
from tests.fork.language._weaving import assert_woven, only_problem, run

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
    problem = only_problem(
        "x = 1\n",
        after(scope="", anchor="x = 1", insert="y = 2", why="test"),
        after(scope="", anchor="y = 2", insert="z = 3", why="test"),
    )
    assert problem.finding == MissingAnchor("")


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
    problem = only_problem(
        "def f():\n    pass\n\nclass C:\n    def g(self):\n        x = 1\n",
        after(scope=scope, anchor="x = 1", insert="y = 2", why="test"),
    )
    assert problem.finding == Moved(scope, ("C.g",))
    assert 'it is now in scope "C.g"' in problem.sentence()


def test_an_inner_function_is_a_scope_of_its_own() -> None:
    source = "def f():\n    def inner():\n        x = 1\n    return inner\n"
    edit = after(scope="f", anchor="x = 1", insert="y = 2", why="test")
    assert only_problem(source, edit).finding == Moved("f", ("f.inner",))
    inner = after(scope="f.inner", anchor="x = 1", insert="y = 2", why="test")
    assert "        x = 1\n        y = 2\n" in (run(source, inner).source or "")


def test_more_matches_than_expected_are_refused() -> None:
    edit = after(scope="", anchor="a()", insert="b()", why="test")
    assert only_problem("a()\na()\n", edit).finding == WrongCount("", 2, 1)


def test_fewer_matches_than_expected_are_refused() -> None:
    edit = after(scope="", anchor="a()", insert="b()", why="test", count=2)
    assert only_problem("a()\n", edit).finding == WrongCount("", 1, 2)


def test_an_expected_count_of_two_edits_both() -> None:
    edit = after(scope="", anchor="a()", insert="b()", why="test", count=2)
    assert_woven("a()\na()\n", "a()\nb()\na()\nb()\n", edit)


@pytest.mark.parametrize("place", [after, before])
def test_weaving_twice_fails(place) -> None:
    edit = place(scope="f", anchor="x = 1", insert="y = 2\nz = 3", why="test")
    once = run("def f():\n    x = 1\n    return x\n", edit).source
    assert once is not None
    assert only_problem(once, edit).finding == AlreadyApplied("f")


def test_nothing_stands_beside_a_clause() -> None:
    with pytest.raises(ValueError, match="first or last"):
        after(scope="", anchor="else:", insert="x()", why="test")


def test_a_reason_is_required() -> None:
    with pytest.raises(ValueError, match="why=''"):
        after(scope="", anchor="x", insert="y", why=" ")
