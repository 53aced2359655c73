# SPDX-License-Identifier: Apache-2.0
"""Runs `vllm serve` with the model runner that the environment names.

    python -m tests.multiprocess.launch MODEL OPTIONS

A separate module, because processes that the server starts import it again, before they
import vllm.
"""

import os
import sys

VERSION = "CLEARBOX_TEST_VERSION"
"""The variable with the version that this node claims to have."""

if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    import tests.support.interpreted  # noqa: F401

if os.environ.get(VERSION):
    import vllm

    vllm.__version__ = os.environ[VERSION]


def main() -> None:
    """Serve according to the command line."""
    from vllm.entrypoints.cli.main import main as cli

    sys.argv.insert(1, "serve")
    cli()


if __name__ == "__main__":
    main()
