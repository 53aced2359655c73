# SPDX-License-Identifier: Apache-2.0
import ast

import pytest

from fork.language.pattern import parse_anchor

MATCHING = [
    ("f(a, 'b')", 'f( a,  # why\n  "b",\n)'),
    ("f(...)", "f()"),
    ("f(...)", "f(1, *a, k=2)"),
    ("f(a, ...)", "f(a, b, c)"),
    ("f(..., k=1)", "f(a, b, k=1)"),
    ("f(__, b)", "f(a + 1, b)"),
    ("x = ...", "x = g(1)[2]"),
    ("x: int = ...", "x: int = 5"),
    ("__.run(x)", "self.a[0].run(x)"),
    ("return __", "return a, b"),
    ("x = 'ab'", "x = 'a' \"b\""),
    ("x = (a)", "x = a"),
    ("[a, ...]", "[a, b, c]"),
    ("for a in b:", "for a in b:\n    pass\nelse:\n    x()"),
    ("with open(...) as f:", "with open(p, 'r') as f:\n    pass"),
    ("while a < b:", "while (a < b):\n    pass"),
    ("def f(...):", "@d\ndef f(a, *, b=1) -> int:\n    return a"),
    ("class C(...):", "class C(A, metaclass=M):\n    pass"),
    ("if a:\n    b()", "if a: b()"),
    ("raise E(f'{a} b')", 'raise E(f"{a} b")'),
]

DIFFERENT = [
    ("f(a, b)", "f(b, a)"),
    ("f(__)", "f()"),
    ("f(__)", "f(a, b)"),
    ("f(__)", "f(k=1)"),
    ("f(a)", "g(a)"),
    ("x = ...", "y = 1"),
    ("x = ...", "x: int = 1"),
    ("x = 'a'", "x = b'a'"),
    ("x = (a,)", "x = a"),
    ("a + b", "a - b"),
    ("x += 1", "x -= 1"),
    ("for a in b:", "for a in c:\n    pass"),
    ("for a in b:", "async def f():\n    async for a in b:\n        pass"),
    ("if a:\n    b()", "if a:\n    b()\n    c()"),
    ("def f(a):", "def f(a, b):\n    pass"),
    ("f(*a)", "f(a)"),
    ("f(**a)", "f(*a)"),
    ("not a", "a"),
    ("a is None", "a is not None"),
    ("return", "return None"),
]


def _is_matched(anchor: str, source: str) -> bool:
    return parse_anchor(anchor).last_of((ast.parse(source).body, 0)) is not None


@pytest.mark.parametrize(("anchor", "source"), MATCHING)
def test_layout_and_wildcards_match(anchor: str, source: str) -> None:
    assert _is_matched(anchor, source)


@pytest.mark.parametrize(("anchor", "source"), DIFFERENT)
def test_other_code_does_not_match(anchor: str, source: str) -> None:
    assert not _is_matched(anchor, source)


@pytest.mark.parametrize("source", [source for _, source in MATCHING + DIFFERENT])
def test_code_matches_itself(source: str) -> None:
    assert _is_matched(source, source)


def test_an_anchor_that_is_no_code_is_refused() -> None:
    with pytest.raises(ValueError, match="not a statement"):
        parse_anchor("x = = 1")
