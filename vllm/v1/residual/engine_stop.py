# SPDX-License-Identifier: Apache-2.0
"""Tells a front end that was told to stop from one whose engine has died.

Upstream's front end reports a dead engine whenever its connection is closed while it
still waits for outputs. That is so at each stop in which the engine is given time, as
it is for captured rows.
"""

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.engine.core_client import MPClient


def log_end(logger: logging.Logger, client: "MPClient") -> None:
    """Log, within an `except` block, why no more outputs of the engine are read."""
    if client.stopping:
        logger.info("[shutdown] AsyncLLM: no more outputs are read")
    else:
        logger.exception("AsyncLLM output_handler failed.")
