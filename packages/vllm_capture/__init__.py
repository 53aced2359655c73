# SPDX-License-Identifier: Apache-2.0
"""The import names of vllm-activation-capture, see `vllm.interop`."""
