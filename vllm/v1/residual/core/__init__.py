# SPDX-License-Identifier: Apache-2.0
"""What the scheduler and the engine core call of the features: one object each."""
