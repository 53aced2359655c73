# SPDX-License-Identifier: Apache-2.0
"""Options that may be repeated: lists in configuration files, and no false warning."""

from fork.language import add_import, before

EDITS = [
    add_import(
        "from vllm.utils.repeated_options import overwritten, repeat_options",
        why="Repeats these options, and recognises them, below.",
    ),
    before(
        scope="FlexibleArgumentParser.load_config_file",
        anchor="return processed_args",
        insert="processed_args = repeat_options(self, processed_args)",
        why="The second value would be parsed as the model.",
    ),
    before(
        scope="FlexibleArgumentParser.parse_args",
        anchor="if duplicates:",
        insert="duplicates = overwritten(self, duplicates)",
        why="The values of an option that may be repeated are all used.",
    ),
]
