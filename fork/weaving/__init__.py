# SPDX-License-Identifier: Apache-2.0
"""Weaving a release: edit files and decoder layers, kept between builds."""
