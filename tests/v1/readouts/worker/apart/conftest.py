# SPDX-License-Identifier: Apache-2.0
import os

from tests.support.subprocess import MARK

# Collected only in the process that `test_apart.py` starts.
collect_ignore_glob = [] if os.environ.get(MARK) else ["test_*.py"]
