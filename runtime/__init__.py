# SPDX-License-Identifier: Apache-2.0
"""What a process needs before the trainer is imported: checks of the ground, and CPU mode."""
