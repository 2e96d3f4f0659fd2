# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tools on a real S3 server."""

import shutil
from collections.abc import Iterator

import pytest

from tests.s3_server import S3Server


@pytest.fixture
def server(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """The server, with the client's configuration in place; afterwards it is empty."""
    pytest.importorskip("multistorageclient")
    monkeypatch.setenv("MSC_CONFIG", str(s3_server.config))
    yield s3_server
    for folder in s3_server.objects.iterdir():
        shutil.rmtree(folder)
