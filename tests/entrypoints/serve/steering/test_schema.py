# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document accepts the forms of a vector that the parser accepts."""

from typing import Any

import jsonschema
import pytest

from vllm.entrypoints.serve.steering.schema import SET

PACKED = {"dtype": "float32", "shape": [1, 2], "layer_indices": [0], "data": "AAAAAA=="}


def check(vectors: Any) -> None:
    schema = SET["requestBody"]["content"]["application/json"]["schema"]
    jsonschema.validate({"vectors": vectors}, schema)


@pytest.mark.parametrize(
    "layer",
    [
        [0.5, 1],
        {"vector": [0.5, 1], "scale": 2},
        {"op": "clamp", "vector": [0.5, 1], "min": -1, "max": 1},
        [{"vector": [0.5, 1]}, {"op": "project_out", "vector": [1, 0]}],
    ],
)
def test_forms_of_a_vector(layer: Any) -> None:
    check({"post_block": {"3": layer}})
    check({"post_block": PACKED})
    check({"blocks.3.hook_resid_post": layer})


@pytest.mark.parametrize("layer", ["a", 1, ["a"], {"op": "paint"}])
def test_what_is_no_vector(layer: Any) -> None:
    with pytest.raises(jsonschema.ValidationError):
        check({"post_block": {"3": layer}})
