# SPDX-License-Identifier: Apache-2.0
"""The tools of vllm-activation-capture: `python -m vllm_capture.tools.NAME`."""
