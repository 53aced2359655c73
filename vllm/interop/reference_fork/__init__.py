# SPDX-License-Identifier: Apache-2.0
"""Steering in the forms of an earlier public fork, translated to our own.

Fields of clamps become entries whose operation is `clamp`, and gates become entries
with `when`; the named vectors of gates are steering modules. The front end loads
`form.py` from the entry-point group `vllm.steering_forms`.
"""
