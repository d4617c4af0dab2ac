"""The backends of uploads that keep the contract."""

import os
import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import paramiko
import pytest
import s3fs
from fsspec.implementations.ftp import FTPFile, FTPFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.implementations.sftp import SFTPFileSystem
from gcsfs import GCSFileSystem
from gcsfs.extended_gcsfs import ExtendedGcsFileSystem

from lightning.fabric.storage.transport.backends.fsspec import FileUpload, PipeUpload, StreamUpload
from lightning.fabric.storage.transport.backends.gcs_zonal import ZonalUpload
from lightning.fabric.storage.transport.backends.local import LocalUpload
from lightning.fabric.storage.transport.backends.obstore import ObstoreUpload
from lightning.fabric.storage.transport.backends.obstore_config import native_store
from lightning.fabric.storage.transport.backends.s3fs import S3Upload
from lightning.fabric.storage.transport.multipart import Parts
from lightning.fabric.storage.transport.upload import UploadBackend
from tests.servers import Bucket
from tests.servers.gcs import GcsBucket, GcsServer
from tests.servers.zonal import Refused, ZonalBucket, ZonalServer, lead_gcsfs_to
from tests.storage.places import NAME, Folder, Memory
from tests.storage.transport.backend_contract import MIB, Act, BackendContract, Target, acting

PARTS = Parts(smallest=5 * MIB, memory=10 * MIB)


class TestLocal(BackendContract):
    @pytest.fixture
    def target(self, tmp_path: Path) -> Target:
        return Target(lambda: LocalUpload(tmp_path / NAME), Folder(tmp_path))

    def reaching(self, step: str, act: Act, monkeypatch: pytest.MonkeyPatch) -> AbstractContextManager[None]:
        owner, name = {
            "begin": (Path, "mkdir"),
            "write": ("lightning.fabric.storage.transport.backends.local", "write_all"),
            "commit": (os, "replace"),
            "abort": (Path, "unlink"),
        }[step]
        return acting(monkeypatch, owner, name, act)


class OnFileSystem(BackendContract):
    """A file system that has folders and renames."""

    fs: ClassVar[type[Any]]
    file: ClassVar[tuple[type[Any], str]]

    def reaching(self, step: str, act: Act, monkeypatch: pytest.MonkeyPatch) -> AbstractContextManager[None]:
        names = {"begin": "makedirs", "commit": "mv", "abort": "rm_file"}
        return acting(monkeypatch, *(self.file if step == "write" else (self.fs, names[step])), act)


class TestSftp(OnFileSystem):
    fs = SFTPFileSystem
    file = (paramiko.SFTPFile, "write")

    @pytest.fixture
    def target(self, sftp: tuple[str, Path]) -> Target:
        url, folder = sftp
        shutil.rmtree(folder)
        folder.mkdir()
        return Target(lambda: FileUpload(*fsspec.url_to_fs(f"{url}/{NAME}")), Folder(folder))


class TestFtp(OnFileSystem):
    fs = FTPFileSystem
    file = (FTPFile, "_upload_chunk")

    @pytest.fixture
    def target(self, ftp: str, tmp_path: Path) -> Target:
        return Target(lambda: FileUpload(*fsspec.url_to_fs(f"{ftp}/{NAME}")), Folder(tmp_path / "ftp"))


class TestMemory(BackendContract):
    steps = ("commit",)

    @pytest.fixture
    def target(self, memory: str) -> Target:
        return Target(lambda: PipeUpload(MemoryFileSystem(), f"/{NAME}", PARTS), Memory())

    def reaching(self, step: str, act: Act, monkeypatch: pytest.MonkeyPatch) -> AbstractContextManager[None]:
        return acting(monkeypatch, MemoryFileSystem, "pipe_file", act)


class OnS3(BackendContract):
    """moto, behind a proxy that lets no request through that it is to stop."""

    @pytest.fixture
    def target(self, bucket: Bucket) -> Target:
        self.bucket = bucket
        return Target(lambda: self.upload(s3fs.S3FileSystem(), f"{bucket.name}/{NAME}"), bucket)

    def upload(self, fs: s3fs.S3FileSystem, path: str) -> UploadBackend:
        raise NotImplementedError

    def reaching(self, step: str, act: Act, monkeypatch: pytest.MonkeyPatch) -> AbstractContextManager[None]:
        def rule(method: str, path: str) -> int | None:
            is_it = {
                "begin": method == "POST" and "uploadId" not in path,
                "write": "partNumber=2" in path,
                "commit": method == "POST" and "uploadId" in path,
                "abort": method == "DELETE",
            }[step]
            return 403 if is_it and act() else None

        return self.bucket.refusing(rule)


class TestS3fs(OnS3):
    has_idle_waits = True

    def upload(self, fs: s3fs.S3FileSystem, path: str) -> UploadBackend:
        return S3Upload(fs, path, PARTS)


class TestObstore(OnS3):
    has_idle_waits = True

    def upload(self, fs: s3fs.S3FileSystem, path: str) -> UploadBackend:
        native = native_store(fs, path)
        if native is None:
            pytest.skip("obstore is not installed")
        return ObstoreUpload(fs, path, *native, PARTS, lambda: S3Upload(fs, path, PARTS), disposable=False)


class TestStreamToS3(OnS3):
    interruptible = ("write", "commit")  # the client does not know an upload whose creation it has not waited for

    def upload(self, fs: s3fs.S3FileSystem, path: str) -> UploadBackend:
        return StreamUpload(fs, path, PARTS.smallest)


class OnGcs(BackendContract):
    """Google's JSON API, in an emulator."""

    @pytest.fixture
    def target(self, gcs: GcsServer, monkeypatch: pytest.MonkeyPatch) -> Target:
        for name, value in gcs.environment.items():
            monkeypatch.setenv(name, value)
        bucket = GcsBucket(gcs)
        fs = GCSFileSystem(token="anon", endpoint_url=gcs.endpoint, project=gcs.environment["GOOGLE_CLOUD_PROJECT"])
        return Target(lambda: self.upload(fs, f"{bucket.name}/{NAME}"), bucket)

    def upload(self, fs: GCSFileSystem, path: str) -> UploadBackend:
        raise NotImplementedError


class TestPipeToGcs(OnGcs):
    steps = ("commit",)

    def upload(self, fs: GCSFileSystem, path: str) -> UploadBackend:
        return PipeUpload(fs, path, PARTS)

    def reaching(self, step: str, act: Act, monkeypatch: pytest.MonkeyPatch) -> AbstractContextManager[None]:
        return acting(monkeypatch, GCSFileSystem, "_pipe_file", act)


@pytest.mark.slow  # the emulator knows no end of a session, which gcsfs asks for again and again
class TestStreamToGcs(OnGcs):
    steps = ("write", "commit", "abort")

    def upload(self, fs: GCSFileSystem, path: str) -> UploadBackend:
        return StreamUpload(fs, path, PARTS.smallest)

    def reaching(self, step: str, act: Act, monkeypatch: pytest.MonkeyPatch) -> AbstractContextManager[None]:
        from gcsfs.core import GCSFile

        name = {"write": "_upload_chunk", "commit": "close", "abort": "discard"}[step]
        return acting(monkeypatch, GCSFile, name, act)


class TestZonal(BackendContract):
    has_idle_waits = True
    interruptible = ("write", "commit")  # the server creates the object also when nobody waits for that any more
    large = 40 * MIB + 777

    @pytest.fixture
    def target(self, zonal: ZonalServer, monkeypatch: pytest.MonkeyPatch) -> Target:
        lead_gcsfs_to(zonal, monkeypatch)
        self.server, bucket = zonal, ZonalBucket(zonal)
        fs = ExtendedGcsFileSystem(token="anon")
        return Target(lambda: ZonalUpload(fs, f"{bucket.name}/{NAME}"), bucket)

    def reaching(self, step: str, act: Act, monkeypatch: pytest.MonkeyPatch) -> AbstractContextManager[None]:
        if step == "abort":
            return acting(monkeypatch, ExtendedGcsFileSystem, "_rm_file", act)
        steps = {"begin": "before create", "write": "before data", "commit": "before move"}

        def fault(at: str) -> None:
            if at == steps[step] and act():
                raise Refused

        return self.server.failing(fault)
