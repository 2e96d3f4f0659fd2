# SPDX-License-Identifier: Apache-2.0
"""Fixtures for caches in both formats, and on a real S3 server."""

import shutil

import pytest

from tests.unit_tests.training.distillation.cache_files import in_format


@pytest.fixture(params=(2, 3), ids=("v2", "v3"))
def cache_format(request):
    """The format of the caches that a test writes: it runs once with each."""
    with in_format(request.param):
        yield request.param


@pytest.fixture
def server(s3_server, monkeypatch):
    """The server, with the client's configuration in place; afterwards it runs and is empty."""
    monkeypatch.setenv("MSC_CONFIG", str(s3_server.config))
    yield s3_server
    for folder in s3_server.objects.iterdir():
        shutil.rmtree(folder)
    if not s3_server.is_running:
        s3_server.start()
