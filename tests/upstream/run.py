# SPDX-License-Identifier: Apache-2.0
"""Runs upstream's own tests of what the fork edits: `make test-upstream`.

They come from the release's source distribution, which is pinned by hash, downloaded
by name and kept in the cache; nothing of it is in this repository.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

from transformers import OPTConfig

from fork.paths import cache_root
from fork.upstream.fetch import verify

ROOT = Path(__file__).parents[2]
TREE = ROOT / "build" / "cpu"
TESTS = (
    "test_outputs.py",
    "test_request_input_bounds.py",
    "test_sampling_params.py",
    "entrypoints/openai/test_penalty_default_resolution.py",
    "v1/core/test_async_scheduler.py",
    "v1/core/test_output.py",
    "v1/core/test_prefix_caching.py",
    "v1/core/test_priority_scheduler_random.py",
    "v1/core/test_repetition_detection.py",
    "v1/core/test_scheduler.py",
    "v1/engine/test_input_processor_trace_replay.py",
    "v1/engine/test_logprobs_processor.py",
    "v1/engine/test_output_processor.py",
    "v1/engine/test_parallel_sampling.py",
)
"""Sampling parameters, requests, outputs, the scheduler and the prefix cache."""


def main() -> int:
    """Run the tests; arguments are passed to pytest. Returns its exit status."""
    folder = _unpacked()
    # Most tests need no more of a model than its configuration.
    model = folder / "facebook" / "opt-125m"
    OPTConfig(architectures=["OPTForCausalLM"]).save_pretrained(model)
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-W", "ignore"]
    command += ["-p", "no:cacheprovider", "-p", "offline", "-o", "addopts="]
    command += [*sys.argv[1:], *(f"tests/{name}" for name in TESTS)]
    paths = (str(TREE), str(Path(__file__).parent))
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    return subprocess.run(command, cwd=folder, env=environment).returncode


def _unpacked() -> Path:
    """The folder with the tests of the pinned release."""
    pins = tomllib.loads((ROOT / "fork" / "upstream.toml").read_text())
    version = pins["version"]
    file, sha256 = (pins["sources"][version][key] for key in ("file", "sha256"))
    folder = cache_root() / "sources" / sha256
    archive = folder / file
    if not archive.exists():
        _download(pins["projects"]["cuda"], version, archive)
    verify(archive, sha256, remedy=f"remove {archive} and run again")
    if not (folder / "tests").exists():
        with (
            tempfile.TemporaryDirectory(dir=folder) as aside,
            tarfile.open(archive) as t,
        ):
            t.extractall(aside, filter="data")
            next(Path(aside).glob("*/tests")).replace(folder / "tests")
    return folder


def _download(project: str, version: str, archive: Path) -> None:
    archive.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", f"{project}=={version}"]
    command += ["--no-deps", "--no-binary", project, "--quiet"]
    command += ["--dest", str(archive.parent)]
    # pip asks the source for its version, which it otherwise derives from the device.
    environment = os.environ | {
        "VLLM_TARGET_DEVICE": "empty",
        "VLLM_VERSION_OVERRIDE": version,
    }
    subprocess.run(command, env=environment, check=True)


if __name__ == "__main__":
    sys.exit(main())
