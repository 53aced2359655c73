# SPDX-License-Identifier: Apache-2.0
"""The environment variables, files and readers of vllm-activation-capture.

`VLLM_ACT_CAPTURE=1` adds a consumer that writes one `.npz` per sequence and layer. The
package `vllm_capture` is installed too, so that scripts run unchanged.
"""
