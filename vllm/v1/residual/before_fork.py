# SPDX-License-Identifier: Apache-2.0
"""Makes it safe to fork an engine's process after tensors were computed in this one.

`LLM` forks that process unless CUDA is initialized. OpenMP's worker threads do not
exist in it, and its first large operation on a CPU would wait for them forever.
"""

import ctypes
import re
from pathlib import Path

_HARD = 2
"""`omp_pause_hard`: OpenMP 5.0, section 3.2.44."""
_RUNTIME = re.compile(r"/lib(gomp|iomp5|omp)[-.\w]*$")


def end_openmp_threads() -> None:
    """End the OpenMP threads that the calling thread has used; new ones start later.

    Without effect where the runtime is unknown or older than OpenMP 5.0.
    """
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # not on Linux
        return
    for path in {line.split(maxsplit=5)[-1] for line in lines if _RUNTIME.search(line)}:
        try:
            ctypes.CDLL(path).omp_pause_resource_all(_HARD)
        except (OSError, AttributeError):
            continue
