"""Servers of stores, each started once for all tests of a process."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.implementations.sftp import SFTPFileSystem
from fsspec.implementations.webhdfs import WebHDFS

from tests.servers import Bucket
from tests.servers import azure as azurite
from tests.servers import hdfs as hadoop
from tests.servers import seaweedfs as weed
from tests.servers.azure import AzureServer, azure_server
from tests.servers.gcs import GcsServer, gcs_server
from tests.servers.hdfs import Hdfs, hdfs_cluster
from tests.servers.seaweedfs import seaweedfs_server
from tests.servers.sftp import sftp_server

if TYPE_CHECKING:
    from tests.servers.zonal import ZonalServer


@pytest.fixture
def without_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user has who did not install obstore."""
    pytest.importorskip(
        "obstore", reason="obstore is not installed: the other tests of this store do without it already"
    )
    monkeypatch.setitem(sys.modules, "obstore", None)


@pytest.fixture
def memory() -> Iterator[str]:
    """The URL of fsspec's dictionary of files, which is empty."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield "memory:/"
    MemoryFileSystem.store.clear()


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    """One bucket for all tests, for the first file of each takes long."""
    if weed.PROGRAM is None:
        pytest.skip(weed.MISSING)
    with seaweedfs_server(tmp_path_factory.mktemp("seaweedfs")) as running:
        yield Bucket(running)


@pytest.fixture(scope="session")
def gcs() -> Iterator[GcsServer]:
    with gcs_server() as running:
        yield running


@pytest.fixture(scope="session")
def zonal() -> Iterator["ZonalServer"]:
    from tests.servers.zonal import zonal_server  # not at the top: the oldest gcsfs has no zonal buckets

    with zonal_server() as running:
        yield running


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureServer]:
    if not azurite.is_installed():
        pytest.skip(azurite.MISSING)
    with azure_server(tmp_path_factory.mktemp("azurite")) as running:
        yield running


@pytest.fixture(scope="session")
def sftp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The URL of a server, and the folder that it serves."""
    folder = tmp_path_factory.mktemp("sftp")
    with sftp_server(folder) as url:
        yield url, folder
    SFTPFileSystem.clear_instance_cache()


@pytest.fixture(scope="session")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hdfs]:
    if not hadoop.is_installed():
        pytest.skip(hadoop.MISSING)
    with hdfs_cluster(tmp_path_factory.mktemp("hdfs")) as running:
        yield running
    WebHDFS.clear_instance_cache()
