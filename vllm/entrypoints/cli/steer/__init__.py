# SPDX-License-Identifier: Apache-2.0
"""`vllm steer`: extracts, converts and evaluates steering vectors."""
