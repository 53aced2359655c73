# SPDX-License-Identifier: Apache-2.0
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.steering.core.name_log import NamesLog

MODULES = st.none() | st.binary(max_size=2)


def test_a_change_that_rests_on_an_old_version_is_not_made() -> None:
    log = NamesLog()
    assert log.change(0, "a", b"1")
    assert not log.change(0, "a", b"2")
    assert log.since(0) == {"a": b"1"} and log.version == 1
    assert log.change(1, "a", None)
    assert log.since(0) == log.since(1) == {"a": None}


@given(st.lists(st.tuples(st.sampled_from("abc"), MODULES)), st.data())
def test_what_is_new_makes_any_version_the_last(
    changes: list[tuple[str, bytes | None]], data: st.DataObject
) -> None:
    log = NamesLog()
    versions: list[dict[str, bytes | None]] = [{}]
    for name, module in changes:
        assert log.change(log.version, name, module)
        versions.append({**versions[-1], name: module})
    known = data.draw(st.integers(0, log.version))
    assert {**versions[known], **log.since(known)} == versions[-1]
    assert log.since(log.version) == {}
