# SPDX-License-Identifier: Apache-2.0
"""Properties of weaving as a whole, and the texts of problems."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fork.language import EditFile, add_import, after, first, since, until, weave
from tests.fork.language._weaving import run

LINES = st.lists(
    st.sampled_from(
        ["a = 1", "b( 2,)", "# c", "", "if a:\n    d()  # e\n\n    f()", "x='''\n y'''"]
    ),
    max_size=12,
)


@given(above=LINES, below=LINES)
def test_everything_but_the_inserted_line_stays(
    above: list[str], below: list[str]
) -> None:
    head = "".join(f"{line}\n" for line in above)
    tail = "".join(f"{line}\n" for line in below)
    source = f"{head}mark()\n{tail}"
    woven = run(source, after(scope="", anchor="mark()", insert="new()", why="test"))
    assert woven.source == f"{head}mark()\nnew()\n{tail}"


def test_all_problems_of_a_file_are_reported_together() -> None:
    woven = run(
        "x = 1\n",
        first(scope="f", insert="y()", why="test"),
        after(scope="", anchor="z = 1", insert="y()", why="test"),
        add_import("import a", why="test"),
    )
    assert woven.source is None
    assert [fault.kind for fault in woven.faults] == [
        "MissingScope",
        "MissingAnchor",
    ]


def test_a_problem_is_one_sentence_with_everything_in_it() -> None:
    woven = run("x = 1\n", after(scope="", anchor="z  =  1", insert="y()", why="test"))
    (fault,) = woven.faults
    assert re.sub(r":\d+:", ":1:", fault.sentence) == (
        "fork/edits/vllm/mini.py:1: after `z = 1` matches nothing at "
        "the module level of vllm/mini.py (vLLM 9.9.9)."
    )


def test_a_result_that_does_not_compile_is_a_problem() -> None:
    woven = run("x = 1\n", after(scope="", anchor="x = 1", insert="break", why="test"))
    (fault,) = woven.faults
    assert "does not compile, line 2" in fault.sentence


@pytest.mark.parametrize(
    ("release", "line"),
    [("0.9.3", "old()"), ("0.10.0rc1", "new()"), ("0.10", "old()"), ("1.0", "new()")],
)
def test_an_edit_may_be_for_some_releases_only(release: str, line: str) -> None:
    old = after(scope="", anchor="mark()", insert="old()", why="test")
    new = after(scope="", anchor="mark()", insert="new()", why="test")
    missing = after(scope="", anchor="gone()", insert="new()", why="test")
    edits = (*until("0.10.0", old), *since("0.10.0", new), *since("2.0", missing))
    woven = weave("mark()\n", EditFile("e.py", "m.py", edits), release)
    assert woven.source == f"mark()\n{line}\n"
