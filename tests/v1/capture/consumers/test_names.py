# SPDX-License-Identifier: Apache-2.0
import re
from typing import Any

import pytest

from vllm.v1.capture.consumers.storage.files import MAX_NAME, place_of, places_of


def sidecar(client_id: str, spec: Any = None, **changes: Any) -> dict[str, Any]:
    said = {"client_request_id": client_id, "client_spec": spec}
    return said | {"num_samples": 1, "sample_index": 0} | changes


@pytest.mark.parametrize(
    "client_id",
    ["cmpl-7-0", "../../x", "a/../b", "/etc", "", ".", "..", ".incomplete", "é\ud800"],
)
def test_any_id_of_a_request_makes_a_plain_name(client_id: str) -> None:
    tag, name = place_of(sidecar(client_id), "default")
    assert tag == "default"
    assert re.fullmatch(r"[A-Za-z0-9._-]+", name)
    assert name not in (".", "..", ".incomplete")


def test_long_ids_make_names_that_differ() -> None:
    names = {
        place_of(sidecar("x" * 300 + end), "t")[1] for end in ("a", "b", "c\ud800")
    }
    assert len(names) == 3
    assert all(len(name) == MAX_NAME for name in names)


def test_a_name_of_full_length_has_room_for_its_samples() -> None:
    spec = {"request_id": "x" * MAX_NAME, "tag": "a b"}
    changes = {"num_samples": 2, "sample_index": 1}
    assert place_of(sidecar("r", spec, **changes), "t") == (
        "a_b",
        "x" * MAX_NAME + "-1",
    )


@pytest.mark.parametrize("spec", [{}, {"request_id": "p/q", "tag": "u"}, {"tag": None}])
@pytest.mark.parametrize("num_samples", [1, 3])
def test_the_places_of_a_request_are_those_of_its_samples(
    spec: dict[str, Any], num_samples: int
) -> None:
    written = [
        "/".join(
            place_of(
                sidecar("a/b", spec, num_samples=num_samples, sample_index=index), "t"
            )
        )
        for index in range(num_samples)
    ]
    assert places_of(spec, "a/b", num_samples, "t") == written
