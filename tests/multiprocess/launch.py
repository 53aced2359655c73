# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` under the runner that the environment names.

    python -m tests.multiprocess.launch MODEL OPTIONS

A module of its own, because processes that the server starts import it anew, before
they import vllm.
"""

import os
import sys

FAULT = "CLEARBOX_TEST_FAULT"
"""The variable that names a file: while it is there, the rank or the engine that it
names fails to change its steering, in workers with the extension `faulty`."""

if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    import tests.support.interpreted  # noqa: F401


def main() -> None:
    """Serve as the command line says."""
    from vllm.entrypoints.cli.main import main as cli

    sys.argv.insert(1, "serve")
    cli()


if __name__ == "__main__":
    main()
