# SPDX-License-Identifier: Apache-2.0
"""Variables of this fork are not reported as unknown."""

from fork.language import add_import, replace

EDITS = [
    add_import(
        "from vllm.utils.own_variables import is_own",
        why="Recognises these variables, below.",
    ),
    replace(
        scope="Platform.validate_environ",
        anchor="env not in envs.environment_variables",
        by="not (env in envs.environment_variables or is_own(env))",
        why="A server with --fail-on-environ-validation would not start with them.",
    ),
]
