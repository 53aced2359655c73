# SPDX-License-Identifier: Apache-2.0
"""The options of our commands are checked before torch is imported."""

from fork.language import before

EDITS = [
    before(
        scope="",
        anchor="import vllm.env_override",
        insert="""
import sys
if "vllm" in sys.argv[0]:
    from vllm.entrypoints.cli.engine_command import check_before_torch
    check_before_torch(sys.argv)
    del check_before_torch
del sys
""",
        why="To import torch, which the next line does, takes seconds.",
    ),
]
