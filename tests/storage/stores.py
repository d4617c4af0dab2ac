"""The stores of the contracts: how a test reaches an empty place in each, and what the store cannot do."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import cycle
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, ClassVar

import fsspec
import pytest
from adlfs import AzureBlobFileSystem
from gcsfs import GCSFileSystem
from s3fs import S3FileSystem

from tests.servers import SECRET, USER, Bucket, Fault, Server, demand_equal_parts
from tests.servers import hdfs as hadoop
from tests.servers import s3_programs as programs
from tests.servers.azure import AzureServer, Container
from tests.servers.gcs import PROJECT, GcsBucket, GcsServer
from tests.servers.hdfs import Hdfs, HdfsFolder
from tests.storage.places import Explicit, Folder, Memory, Store

if TYPE_CHECKING:
    from tests.servers.zonal import ZonalServer

MIB = 2**20
#: A port that nobody listens on.
NOWHERE = "http://127.0.0.1:9"
_CLIENTS = (S3FileSystem, GCSFileSystem, AzureBlobFileSystem)


def enter(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


class OnStore:
    """Tests on a store. Attributes say what the store, not our code, is not able to do."""

    #: Those of `tests.storage.places.NAMES` that its client takes for others: to save there is an error that says so.
    refused_names: ClassVar[tuple[str, ...]] = ()
    #: Bytes that are more than the lowered limits let through at once.
    beyond_limits: ClassVar[int] = 400_000
    #: Whether of several objects that are put under one name at a time, one is there at last.
    has_whole_puts: ClassVar[bool] = True
    #: Whether it knows of uploads that are given up, and drops their parts.
    takes_uploads_back: ClassVar[bool] = True
    #: Whether a client can be used by several threads.
    has_threads: ClassVar[bool] = True

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _new_clients(cls) -> Iterator[None]:
        """A client that was made for another server remembers the variables of that time; making one takes long."""
        for client in _CLIENTS:
            client.clear_instance_cache()
        yield
        for client in _CLIENTS:
            client.clear_instance_cache()

    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError("a store provides it")

    def assert_nothing_is_unfinished(self, store: Store) -> None:
        assert not self.takes_uploads_back or store.outside.unfinished_uploads() == []


class Local(OnStore):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return Store(str(tmp_path), Folder(tmp_path))


class InMemory(OnStore):
    @pytest.fixture
    def store(self, memory: str) -> Store:
        return Store(memory, Memory())


def s3_store(bucket: Bucket) -> Store:
    options = {"endpoint_url": bucket.server.endpoint, "key": bucket.server.key, "secret": SECRET}
    return Store(bucket.url, bucket, Explicit(bucket.url, options, {"AWS_ENDPOINT_URL": NOWHERE}))


class S3(OnStore):
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
class S3WithoutObstore(S3):
    pass


class S3FarAway(S3):
    @pytest.fixture
    def store(self, moto: Bucket) -> Iterator[Store]:
        with moto.refusing(lambda method, path: sleep(0.005)):
            yield s3_store(moto)


class S3WithTransientFaults(S3):
    @pytest.fixture
    def store(self, moto: Bucket) -> Iterator[Store]:
        """Every twelfth request goes wrong, each time in another way."""
        faults = (503, Fault.RESET, 500, Fault.CUT, 429)
        outcomes = cycle([outcome for fault in faults for outcome in (*[None] * 11, fault)])
        with moto.refusing(lambda method, path: next(outcomes)):
            yield s3_store(moto)


@pytest.mark.usefixtures("without_obstore")
class S3WithTransientFaultsWithoutObstore(S3WithTransientFaults):
    pass


class SeaweedFS(OnStore):
    beyond_limits = 12 * MIB

    @pytest.fixture
    def store(self, seaweedfs: Bucket, monkeypatch: pytest.MonkeyPatch) -> Store:
        enter(seaweedfs.server.environment, monkeypatch)
        seaweedfs.empty()
        return s3_store(seaweedfs)


class S3Program(OnStore):
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
class Rclone(S3Program):
    start = programs.rclone_server
    bucket = programs.RcloneBucket


@pytest.mark.usefixtures("without_obstore")
class RcloneWithoutObstore(Rclone):
    pass


@pytest.mark.stores
class JuiceFS(S3Program):
    start = programs.juicefs_server


@pytest.mark.stores
@pytest.mark.skipif(programs.NGINX is None, reason=programs.WITHOUT_NGINX)
class JuiceFSBehindNginx(S3Program):
    start = programs.nginx_before_juicefs


@pytest.mark.usefixtures("without_obstore")
class JuiceFSBehindNginxWithoutObstore(JuiceFSBehindNginx):
    pass


@pytest.mark.stores
class S3rver(S3Program):
    start = programs.s3rver_server
    takes_uploads_back = False
    has_whole_puts = False  # two at a time write to one file


@pytest.mark.usefixtures("without_obstore")
class S3rverWithoutObstore(S3rver):
    pass


@pytest.mark.stores
class Nanio(S3Program):
    start = programs.nanio_server
    refused_names = ("a%20b",)  # of which it makes another signature


@pytest.mark.usefixtures("without_obstore")
class NanioWithoutObstore(Nanio):
    pass


class Gcs(OnStore):
    """An emulator without TLS, which obstore is never used for."""

    beyond_limits = 12 * MIB

    @pytest.fixture
    def store(self, gcs: GcsServer, monkeypatch: pytest.MonkeyPatch) -> Store:
        enter(gcs.environment, monkeypatch)
        monkeypatch.setitem(fsspec.config.conf, "gcs", {"token": "anon"})  # and not the credentials of who runs this
        bucket = GcsBucket(gcs)
        options = {"endpoint_url": gcs.endpoint, "token": "anon", "project": PROJECT}
        return Store(bucket.url, bucket, Explicit(bucket.url, options, {"STORAGE_EMULATOR_HOST": NOWHERE}))


class Zonal(OnStore):
    beyond_limits = 40 * MIB

    @pytest.fixture
    def store(self, zonal: "ZonalServer", monkeypatch: pytest.MonkeyPatch) -> Store:
        from tests.servers.zonal import (  # not at the top: the oldest gcsfs has no such buckets
            ZonalBucket,
            lead_gcsfs_to,
        )

        lead_gcsfs_to(zonal, monkeypatch)
        monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
        bucket = ZonalBucket(zonal)
        return Store(bucket.url, bucket)


@pytest.mark.azure
class Azure(OnStore):
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
class AzureWithoutObstore(Azure):
    pass


def with_login_as_options(url: str) -> Explicit:
    return Explicit(url.replace(f"{USER}:{SECRET}@", ""), {"username": USER, "password": SECRET})


class Sftp(OnStore):
    @pytest.fixture
    def store(self, sftp: tuple[str, Path]) -> Store:
        url, folder = sftp
        shutil.rmtree(folder)
        folder.mkdir()
        return Store(url, Folder(folder), with_login_as_options(url))


class Ftp(OnStore):
    has_threads = False  # it has one control connection

    @pytest.fixture
    def store(self, ftp: str, tmp_path: Path) -> Store:
        return Store(ftp, Folder(tmp_path / "ftp"), with_login_as_options(ftp))


@pytest.mark.hdfs
class WebHdfs(OnStore):
    refused_names = ("a%20b", "50% + é=1")  # a data node decodes names once more than a name node

    @pytest.fixture
    def store(self, hdfs: Hdfs) -> Store:
        folder = HdfsFolder(hdfs)
        return Store(f"{hdfs.web_url}{folder.path}", folder)


@pytest.mark.hdfs
class NativeHdfs(OnStore):
    refused_names = ("a?", "a?b#c")  # the client takes what follows on the mark for a query

    @pytest.fixture
    def store(self, hdfs: Hdfs, monkeypatch: pytest.MonkeyPatch) -> Store:
        enter(hadoop.environment(), monkeypatch)
        monkeypatch.syspath_prepend(hadoop.PYTHON)
        folder = HdfsFolder(hdfs)
        return Store(f"{hdfs.native_url}{folder.path}", folder)
