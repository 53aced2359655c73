# SPDX-License-Identifier: Apache-2.0
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "capture_consumers"
PACKAGES = (
    EXAMPLES / "mean_norm",
    EXAMPLES / "row_stream",
    EXAMPLES / "probe_trainer",
    Path(__file__).parent / "reference_plugin",
)


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all packages installed, as a user installs them; no network."""
    target = tmp_path_factory.mktemp("installed")
    sources = tmp_path_factory.mktemp("sources")  # a build leaves files there
    copies = [
        str(shutil.copytree(package, sources / package.name)) for package in PACKAGES
    ]
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--quiet"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target"]
    subprocess.run([*command, str(target), *copies], check=True)
    return target
