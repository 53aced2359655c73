# SPDX-License-Identifier: Apache-2.0
"""Sets of vectors, as files and requests have them."""

from vllm.v1.steering.spec.files import (
    VectorSet,
    save_module,
    vector_set,
)
from vllm.v1.steering.spec.files import read_vectors as load_vectors

__all__ = ["VectorSet", "load_vectors", "save_module", "vector_set"]
