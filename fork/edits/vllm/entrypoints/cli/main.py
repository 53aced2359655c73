# SPDX-License-Identifier: Apache-2.0
"""The command line has `vllm steer` and `vllm probe`."""

from fork.language import before

EDITS = [
    before(
        scope="main",
        anchor='if sys.argv[1:2] != ["snapshot"]:',
        insert="""
import vllm.entrypoints.cli.probe.main
import vllm.entrypoints.cli.steer.main
CMD_MODULES.append(vllm.entrypoints.cli.probe.main)
CMD_MODULES.append(vllm.entrypoints.cli.steer.main)
""",
        why="Vectors are extracted and tried out, and probes are trained.",
    ),
]
