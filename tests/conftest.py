# SPDX-License-Identifier: Apache-2.0
"""What unit tests and functional tests share."""

from collections.abc import Iterator

import pytest

from tests.s3_server import S3Server, running_s3_server


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A running S3 server; a test that stops it starts it again."""
    with running_s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server
