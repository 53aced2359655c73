# SPDX-License-Identifier: Apache-2.0
"""Properties of weaving as a whole, and the texts of problems."""

from hypothesis import given
from hypothesis import strategies as st

from fork.language import add_import, after, first
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
    assert [problem.kind for problem in woven.problems] == [
        "MissingScope",
        "MissingAnchor",
    ]


def test_a_problem_is_one_sentence_with_everything_in_it() -> None:
    woven = run("x = 1\n", after(scope="", anchor="z  =  1", insert="y()", why="test"))
    (problem,) = woven.problems
    assert problem.sentence() == (
        f"fork/edits/vllm/mini.py:{problem.line}: after `z = 1` matches nothing at "
        "the module level of vllm/mini.py (vLLM 9.9.9)."
    )


def test_a_result_that_does_not_compile_is_a_problem() -> None:
    woven = run("x = 1\n", after(scope="", anchor="x = 1", insert="break", why="test"))
    (problem,) = woven.problems
    assert "does not compile, line 2" in problem.sentence()
