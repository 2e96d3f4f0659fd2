# SPDX-License-Identifier: Apache-2.0
"""Fixtures for caches in both formats, and on a real S3 server."""

from tests.unit_tests.training.distillation.conftest import cache_format, server

__all__ = ["cache_format", "server"]
