"""Servers of stores."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.implementations.sftp import SFTPFileSystem

from tests.servers.gcs import GcsServer, gcs_server
from tests.servers.sftp import sftp_server
from tests.servers.zonal import ZonalServer, zonal_server


@pytest.fixture(scope="session")
def gcs() -> Iterator[GcsServer]:
    with gcs_server() as running:
        yield running


@pytest.fixture(scope="session")
def zonal() -> Iterator[ZonalServer]:
    with zonal_server() as running:
        yield running


@pytest.fixture(scope="session")
def sftp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The URL of a server, and the folder that it serves."""
    folder = tmp_path_factory.mktemp("sftp")
    with sftp_server(folder) as url:
        yield url, folder
    SFTPFileSystem.clear_instance_cache()
