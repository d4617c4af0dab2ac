"""The stores that keep the contract."""

import gc
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import cycle
from pathlib import Path
from time import sleep
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from adlfs import AzureBlobFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.implementations.webhdfs import WebHDFS
from gcsfs import GCSFileSystem
from s3fs import S3FileSystem

from lightning.fabric.storage.archives.load import archive
from lightning.fabric.storage.archives.save import save_file
from lightning.fabric.storage.transport.backends import fsspec_reader
from tests.servers import SECRET, USER, Bucket, Fault, Server, demand_equal_parts
from tests.servers import azure as azurite
from tests.servers import hdfs as hadoop
from tests.servers import s3_programs as programs
from tests.servers import seaweedfs as weed
from tests.servers.azure import AzureServer, Container, azure_server
from tests.servers.gcs import PROJECT, GcsBucket, GcsServer
from tests.servers.hdfs import Hdfs, HdfsFolder, hdfs_cluster
from tests.servers.seaweedfs import seaweedfs_server
from tests.servers.zonal import ZonalBucket, ZonalServer, lead_gcsfs_to
from tests.storage.contract import MIB, StorageContract, write
from tests.storage.places import NAME, Explicit, Folder, Memory, Store

#: A port that nobody listens on.
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def without_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user has who did not install obstore."""
    pytest.importorskip(
        "obstore", reason="obstore is not installed: the other tests of this store do without it already"
    )
    monkeypatch.setitem(sys.modules, "obstore", None)


@pytest.fixture(autouse=True, scope="class")
def _new_clients() -> Iterator[None]:
    """A client that was made for another server remembers the variables of that time; making one takes long."""
    clients = (S3FileSystem, GCSFileSystem, AzureBlobFileSystem)
    for client in clients:
        client.clear_instance_cache()
    yield
    for client in clients:
        client.clear_instance_cache()


def enter(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


class TestLocal(StorageContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return Store(str(tmp_path), Folder(tmp_path))


class TestMemory(StorageContract):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]
        yield Store("memory:/", Memory())
        MemoryFileSystem.store.clear()


def s3_store(bucket: Bucket) -> Store:
    options = {"endpoint_url": bucket.server.endpoint, "key": bucket.server.key, "secret": SECRET}
    return Store(bucket.url, bucket, Explicit(bucket.url, options, {"AWS_ENDPOINT_URL": NOWHERE}))


class TestS3(StorageContract):
    beyond_limits = 12 * MIB

    @pytest.fixture
    def moto(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> Bucket:
        """As the fixture ``bucket``, but clients stay."""
        enter(server.environment, monkeypatch)
        demand_equal_parts(monkeypatch)
        return Bucket(server)

    @pytest.fixture
    def store(self, moto: Bucket) -> Store:
        return s3_store(moto)


@pytest.mark.usefixtures("without_obstore")
class TestS3WithoutObstore(TestS3):
    pass


class TestS3FarAway(TestS3):
    @pytest.fixture
    def store(self, moto: Bucket) -> Iterator[Store]:
        with moto.refusing(lambda method, path: sleep(0.005)):
            yield s3_store(moto)


class TestS3WithTransientFaults(TestS3):
    @pytest.fixture
    def store(self, moto: Bucket) -> Iterator[Store]:
        """Every twelfth request goes wrong, each time in another way."""
        faults = (503, Fault.RESET, 500, Fault.CUT, 429)
        outcomes = cycle([outcome for fault in faults for outcome in (*[None] * 11, fault)])
        with moto.refusing(lambda method, path: next(outcomes)):
            yield s3_store(moto)


@pytest.mark.usefixtures("without_obstore")
class TestS3WithTransientFaultsWithoutObstore(TestS3WithTransientFaults):
    pass


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    """One bucket for all tests, for the first file of each takes long."""
    if weed.PROGRAM is None:
        pytest.skip(weed.MISSING)
    with seaweedfs_server(tmp_path_factory.mktemp("seaweedfs")) as running:
        yield Bucket(running)


class TestSeaweedFS(StorageContract):
    beyond_limits = 12 * MIB

    @pytest.fixture
    def store(self, seaweedfs: Bucket, monkeypatch: pytest.MonkeyPatch) -> Store:
        enter(seaweedfs.server.environment, monkeypatch)
        seaweedfs.empty()
        return s3_store(seaweedfs)


class S3Program(StorageContract):
    """A server that `make test-stores` installs."""

    beyond_limits = 12 * MIB
    start: ClassVar[Callable[[Path], AbstractContextManager[Server]]]
    bucket: ClassVar[type[Bucket]] = Bucket

    @pytest.fixture(scope="class")
    @classmethod
    def program(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
        if not programs.is_installed():
            pytest.skip(programs.MISSING)
        with cls.start(tmp_path_factory.mktemp("store")) as running:
            yield cls.bucket(running)

    @pytest.fixture
    def store(self, program: Bucket, monkeypatch: pytest.MonkeyPatch) -> Store:
        enter(program.server.environment, monkeypatch)
        program.empty()
        return s3_store(program)


@pytest.mark.stores
class TestRclone(S3Program):
    start = programs.rclone_server
    bucket = programs.RcloneBucket


@pytest.mark.usefixtures("without_obstore")
class TestRcloneWithoutObstore(TestRclone):
    pass


@pytest.mark.stores
class TestJuiceFS(S3Program):
    start = programs.juicefs_server


@pytest.mark.stores
@pytest.mark.skipif(programs.NGINX is None, reason=programs.WITHOUT_NGINX)
class TestJuiceFSBehindNginx(S3Program):
    start = programs.nginx_before_juicefs


@pytest.mark.usefixtures("without_obstore")
class TestJuiceFSBehindNginxWithoutObstore(TestJuiceFSBehindNginx):
    pass


@pytest.mark.stores
class TestS3rver(S3Program):
    start = programs.s3rver_server
    takes_uploads_back = False
    has_whole_puts = False  # two at a time write to one file


@pytest.mark.usefixtures("without_obstore")
class TestS3rverWithoutObstore(TestS3rver):
    pass


class TestGcs(StorageContract):
    beyond_limits = 12 * MIB

    @pytest.fixture
    def store(self, gcs: GcsServer, monkeypatch: pytest.MonkeyPatch) -> Store:
        enter(gcs.environment, monkeypatch)
        monkeypatch.setitem(fsspec.config.conf, "gcs", {"token": "anon"})  # and not the credentials of who runs this
        bucket = GcsBucket(gcs)
        options = {"endpoint_url": gcs.endpoint, "token": "anon", "project": PROJECT}
        return Store(bucket.url, bucket, Explicit(bucket.url, options, {"STORAGE_EMULATOR_HOST": NOWHERE}))


@pytest.mark.usefixtures("without_obstore")
class TestGcsWithoutObstore(TestGcs):
    pass


class TestZonal(StorageContract):
    beyond_limits = 40 * MIB

    @pytest.fixture
    def store(self, zonal: ZonalServer, monkeypatch: pytest.MonkeyPatch) -> Store:
        lead_gcsfs_to(zonal, monkeypatch)
        monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
        bucket = ZonalBucket(zonal)
        return Store(bucket.url, bucket)


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureServer]:
    if not azurite.is_installed():
        pytest.skip(azurite.MISSING)
    with azure_server(tmp_path_factory.mktemp("azurite")) as running:
        yield running


@pytest.mark.azure
class TestAzure(StorageContract):
    beyond_limits = 12 * MIB
    refused_names = ("a?b#c",)  # adlfs makes another name of it

    @pytest.fixture
    def store(self, azure: AzureServer, monkeypatch: pytest.MonkeyPatch) -> Store:
        enter(azure.environment, monkeypatch)
        container = Container(azure)
        options = {"connection_string": azure.connection_string}
        nowhere = azure.connection_string.replace(azure.endpoint, NOWHERE)
        misleading = {"AZURE_STORAGE_CONNECTION_STRING": nowhere}
        return Store(container.url, container, Explicit(container.url, options, misleading))


@pytest.mark.usefixtures("without_obstore")
class TestAzureWithoutObstore(TestAzure):
    pass


def with_login_as_options(url: str) -> Explicit:
    return Explicit(url.replace(f"{USER}:{SECRET}@", ""), {"username": USER, "password": SECRET})


class TestSftp(StorageContract):
    @pytest.fixture
    def store(self, sftp: tuple[str, Path]) -> Store:
        url, folder = sftp
        shutil.rmtree(folder)
        folder.mkdir()
        return Store(url, Folder(folder), with_login_as_options(url))

    def test_a_file_that_is_collected_while_the_client_is_at_work_does_not_stop_it_for_ever(
        self, sftp: tuple[str, Path]
    ) -> None:
        url, _ = sftp
        save_file({"w": torch.ones(2)}, f"{url}/x.ckpt")
        before = set(fsspec_reader._open_files)
        ring: dict[str, Any] = {"file": archive(f"{url}/x.ckpt")}
        ring["itself"] = ring
        (key,) = fsspec_reader._open_files.keys() - before
        _, fs, opened = fsspec_reader._open_files[key]
        del ring
        with fs.ftp._lock:  # as while a request is being numbered
            gc.collect()
        assert not opened.closed
        save_file({"w": torch.ones(2)}, f"{url}/y.ckpt")
        assert opened.closed


class TestFtp(StorageContract):
    has_threads = False  # it has one control connection

    @pytest.fixture
    def store(self, ftp: str, tmp_path: Path) -> Store:
        return Store(ftp, Folder(tmp_path / "ftp"), with_login_as_options(ftp))


@pytest.fixture(scope="session")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hdfs]:
    if not hadoop.is_installed():
        pytest.skip(hadoop.MISSING)
    with hdfs_cluster(tmp_path_factory.mktemp("hdfs")) as running:
        yield running
    WebHDFS.clear_instance_cache()


@pytest.mark.hdfs
class TestWebHdfs(StorageContract):
    refused_names = ("a%20b", "50% + é=1")  # a data node decodes names once more than a name node

    @pytest.fixture
    def store(self, hdfs: Hdfs) -> Store:
        folder = HdfsFolder(hdfs)
        return Store(f"{hdfs.web_url}{folder.path}", folder)

    def test_a_file_takes_the_place_of_another_in_one_step(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        call = WebHDFS._call
        renames = []

        def watched(fs: WebHDFS, operation: str, *arguments: Any, **options: Any) -> Any:
            answer = call(fs, operation, *arguments, **options)
            if operation == "RENAME":
                renames.append(store.outside.get(NAME))
            return answer

        store.outside.put(NAME, b"old")
        monkeypatch.setattr(WebHDFS, "_call", watched)
        write(store.url, b"new")
        assert renames == [b"new"]


@pytest.mark.hdfs
class TestHdfs(StorageContract):
    refused_names = ("a?", "a?b#c")  # the client takes what follows on the mark for a query

    @pytest.fixture
    def store(self, hdfs: Hdfs, monkeypatch: pytest.MonkeyPatch) -> Store:
        enter(hadoop.environment(), monkeypatch)
        monkeypatch.syspath_prepend(hadoop.PYTHON)
        folder = HdfsFolder(hdfs)
        return Store(f"{hdfs.native_url}{folder.path}", folder)
