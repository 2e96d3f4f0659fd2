# SPDX-License-Identifier: Apache-2.0
"""Fixtures for caches in both formats, and on a real S3 server."""

import shutil

import pytest

from megatron.training.distillation import object_store, storage_retry
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


@pytest.fixture
def calls(monkeypatch) -> list:
    """The S3 operations that are called, by name; put a name in front of ``fail`` to break it."""
    from botocore.client import BaseClient
    from botocore.exceptions import EndpointConnectionError

    seen: list = []
    original = BaseClient._make_api_call

    def call(self, operation, parameters):
        seen.append(operation)
        if f"fail {operation}" in seen:
            seen.remove(f"fail {operation}")
            raise EndpointConnectionError(endpoint_url="http://gone")
        return original(self, operation, parameters)

    monkeypatch.setattr(BaseClient, "_make_api_call", call)
    return seen


@pytest.fixture
def pauses(monkeypatch) -> list:
    """Functions to call in place of the next pauses between attempts; no pause takes any time."""
    actions: list = []

    def impatient(action, **options):
        def pause(seconds):
            if actions:
                actions.pop(0)()

        return storage_retry.retry(action, **{**options, "pause": pause})

    monkeypatch.setattr(object_store, "retry", impatient)
    return actions
