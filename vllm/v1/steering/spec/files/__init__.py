# SPDX-License-Identifier: Apache-2.0
"""Files of named vectors: our two forms, and those of other projects.

`read_module(path)` reads any of them. Facts that a file does not contain are appended
to its name, as in `FILE?hook=post_block&layer=15`.
"""

from vllm.v1.steering.spec.files.own import FORMAT, ModuleFile, save_module
from vllm.v1.steering.spec.files.read import read_module, read_vectors
from vllm.v1.steering.spec.files.vectors import VectorSet, inner_point, vector_set
from vllm.v1.steering.spec.reading import Reading

__all__ = [
    "FORMAT",
    "ModuleFile",
    "Reading",
    "VectorSet",
    "inner_point",
    "read_module",
    "read_vectors",
    "save_module",
    "vector_set",
]
