# SPDX-License-Identifier: Apache-2.0
"""A list in a configuration file repeats options that take a single value."""

from fork.language import add_import, before

EDITS = [
    add_import(
        "from vllm.utils.repeated_options import repeat_options",
        why="Repeats these options, below.",
    ),
    before(
        scope="FlexibleArgumentParser.load_config_file",
        anchor="return processed_args",
        insert="processed_args = repeat_options(self, processed_args)",
        why="The second value would be parsed as the model.",
    ),
]
