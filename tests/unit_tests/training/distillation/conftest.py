# SPDX-License-Identifier: Apache-2.0
"""Fixtures for what goes wrong on a real S3 server."""

import pytest

from megatron.training.distillation import object_store, storage_retry


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
