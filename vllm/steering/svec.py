# SPDX-License-Identifier: Apache-2.0
"""Steering vectors of IBM's activation-steering, `.svec`.

A JSON object: `model_type`, and `directions`, which maps the number of a block to its
vector. That library adds the vector of block L to what enters the block: our `pre_attn`
of layer L (`activation_steering/leash_layer.py`).
"""

import json
from pathlib import Path

from vllm.steering.vectors import VectorSet, vector_set
from vllm.v1.steering.errors import fail
from vllm.v1.steering.spec.provenance import Provenance

HOOK = "pre_attn"


def read_svec(path: str | Path, hook: str | None = None) -> VectorSet:
    """The vectors of a `.svec` file.

    Args:
        path: the file.
        hook: where to add them instead of where they are meant for.

    Raises:
        SteeringValidationError: the file is missing, or none of this form.

    """
    file = Path(path)
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        directions = found["directions"]
        vectors = {(int(n), hook or HOOK): one for n, one in directions.items()}
        model_type = str(found.get("model_type", ""))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise fail(
            f"path: {file.name!r} is no .svec file, a JSON object with the directions "
            f"of blocks: {type(error).__name__}: {error}",
            "path",
            str(path),
        ) from None
    said = Provenance(model_type=model_type, origin=f"{file.name}, activation-steering")
    return vector_set(vectors, said, str(path))
