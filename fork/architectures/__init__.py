# SPDX-License-Identifier: Apache-2.0
"""Which of upstream's architectures have hook points, and which ones."""
