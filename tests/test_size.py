# SPDX-License-Identifier: Apache-2.0
from tests.size import c_lines, python_lines

PYTHON = '''"""What the module is for.

In two paragraphs.
"""

# A comment.
import os

LIMIT = 3
"""What limits."""

TEXT = """
two lines of it count
"""


def size(path: str) -> int:
    """Bytes of a file."""
    return os.stat(
        path  # an argument
    ).st_size
'''

CPP = """// A comment.
#include "rows.h"
/* Another
   comment. */
const char *url = "http://x";  // and one behind code
"""


def test_comments_docstrings_and_blank_lines_do_not_count() -> None:
    assert python_lines(PYTHON) == 9


def test_cpp_is_counted_without_comments() -> None:
    assert c_lines(CPP) == 2
