# SPDX-License-Identifier: Apache-2.0
"""What the log says of a streamed request that fails."""

import logging

from vllm.exceptions import VLLMClientError


def log(logger: logging.Logger, summary: str, error: Exception) -> None:
    """Log a failure, with its traceback unless the request was invalid.

    A stream's response has begun with status 200 when its request is validated, so the
    access log does not show the refusal.
    """
    if isinstance(error, VLLMClientError):
        logger.info("A streamed request was refused: %s", error)
    else:
        logger.error(summary, exc_info=error)
