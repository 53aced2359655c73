# SPDX-License-Identifier: Apache-2.0
"""A tool of vllm-activation-capture, see `vllm.interop.activation_capture.tools`."""

import sys

from vllm.interop.activation_capture.tools import patch

if __name__ == "__main__":
    sys.exit(patch())
