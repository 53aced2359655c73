# SPDX-License-Identifier: Apache-2.0
"""`vllm steer`: getting steering vectors and trying them out."""
