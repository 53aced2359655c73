# SPDX-License-Identifier: Apache-2.0
"""`--help` of our commands lists their options.

Upstream's parser lists only the titles of groups, as an engine has hundreds of options.
Our options are listed after them, in the epilog.
"""

from typing import Any

ENGINE_GROUPS = ("capture", "steering")
"""Groups of an engine's options whose titles do not end in `Config`."""


def list_own_options(parser: Any) -> None:
    """Put the options of a command, without an engine's, into its help's epilog.

    Args:
        parser: upstream's `FlexibleArgumentParser`, with all options declared.

    """
    formatter = parser._get_formatter()
    for group in parser._action_groups:
        title = group.title or ""
        if title.endswith("Config") or title in ENGINE_GROUPS:
            continue
        formatter.start_section(title)
        formatter.add_arguments(group._group_actions)
        formatter.end_section()
    parser.epilog = f"{formatter.format_help()}\n{parser.epilog or ''}"
