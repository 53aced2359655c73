# SPDX-License-Identifier: Apache-2.0
"""What the consumers that write files share: buffers, writer threads, whole files."""
