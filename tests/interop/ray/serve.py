# SPDX-License-Identifier: Apache-2.0
"""Runs `vllm serve` with upstream's Ray executor on CPUs.

    python -m tests.interop.ray.serve MODEL OPTIONS

A separate module, because the engine's process imports it again.
"""

from tests.interop.ray.slots import use_slots
from tests.multiprocess.launch import main

use_slots()

if __name__ == "__main__":
    main()
