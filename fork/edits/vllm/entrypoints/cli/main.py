# SPDX-License-Identifier: Apache-2.0
"""The command line has `vllm steer`, `vllm probe`, `vllm capture` and `vllm check`."""

from fork.language import before

EDITS = [
    before(
        scope="main",
        anchor="if maybe_run_omni():",
        insert="""
from vllm.entrypoints.cli.engine_command import check_own_options
check_own_options(sys.argv)
""",
        why="Lists and checks our commands' own options before the imports below, "
        "which take seconds.",
    ),
    before(
        scope="main",
        anchor='if sys.argv[1:2] != ["snapshot"]:',
        insert="""
import vllm.entrypoints.cli.engine_command
CMD_MODULES.append(vllm.entrypoints.cli.engine_command)
""",
        why="Adds commands for vectors, probes, data sets and the comparison of rows "
        "with another library.",
    ),
]
