# SPDX-License-Identifier: Apache-2.0
"""What tests of compiled code need."""

import sys

import pytest

needs_compiler = pytest.mark.skipif(
    " " in sys.prefix,
    reason="PyTorch's compiler cannot link in an environment whose path has a space",
)
