# SPDX-License-Identifier: Apache-2.0
"""Reads `.svec` files, the format of IBM's activation-steering library.

A file is a JSON object with `model_type` and `directions`, which maps the number of a
block to its vector. The library adds the vector of block L to the input of the block,
our `pre_attn` of layer L (`activation_steering/leash_layer.py`).
"""

import json
from pathlib import Path

from vllm.v1.steering.errors import fail
from vllm.v1.steering.spec.files.vectors import VectorSet, vector_set
from vllm.v1.steering.spec.provenance import Provenance

HOOK = "pre_attn"


def read_svec(path: str | Path) -> VectorSet:
    """Read the vectors of a `.svec` file.

    Raises:
        SteeringValidationError: the file is missing or invalid.

    """
    file = Path(path)
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        directions = found["directions"]
        vectors = {(int(n), HOOK): one for n, one in directions.items()}
        model_type = str(found.get("model_type", ""))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise fail(
            f"path: {file.name!r} is not an .svec file, a JSON object with the "
            f"directions of blocks: {type(error).__name__}: {error}",
            "path",
            str(path),
        ) from None
    said = Provenance(model_type=model_type, origin=f"{file.name}, activation-steering")
    return vector_set(vectors, said, str(path))
