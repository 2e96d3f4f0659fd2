# SPDX-License-Identifier: Apache-2.0
"""Examples that run in place from the root of the tree."""
