# SPDX-License-Identifier: Apache-2.0
"""What the front end of an engine calls of the features: one object for each engine."""
