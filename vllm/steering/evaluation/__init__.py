# SPDX-License-Identifier: Apache-2.0
"""Is a steering vector any good: what it does, and what it costs the model."""
