# SPDX-License-Identifier: Apache-2.0
"""vllm-activation-capture's import names; see `vllm.interop.activation_capture`."""
