# SPDX-License-Identifier: Apache-2.0
"""vllm-activation-capture's variables, files and readers.

`VLLM_ACT_CAPTURE=1` adds a consumer that writes one `.npz` per sequence and layer.
Installed as the package `vllm_capture` too, so that its scripts run unchanged.
"""
