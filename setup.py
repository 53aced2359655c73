# SPDX-License-Identifier: Apache-2.0
"""Build the fork and package the tree as distribution `vllm`."""

import sys
from pathlib import Path

from setuptools import setup

# A PEP 517 front end does not put the project's folder on the path.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from fork.building.packaging import setup_arguments

setup(**setup_arguments())
