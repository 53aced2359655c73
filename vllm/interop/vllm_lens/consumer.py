# SPDX-License-Identifier: Apache-2.0
"""The consumer for `output_residual_stream`."""

from typing import ClassVar

from vllm.v1.capture.consumers.inline import InlineConsumer


class LensConsumer(InlineConsumer):
    """The `inline` consumer, whose rows are returned only at the request's end."""

    streams: ClassVar[bool] = False
