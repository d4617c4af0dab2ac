"""The stores that keep the contract for files."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.webhdfs import WebHDFS

from lightning.fabric.storage.archives.load import archive
from lightning.fabric.storage.archives.save import save_file
from lightning.fabric.storage.transport.backends import fsspec_reader
from tests.storage import stores
from tests.storage.contract import StorageContract, write
from tests.storage.places import NAME, Store


class TestLocal(stores.Local, StorageContract):
    pass


class TestMemory(stores.InMemory, StorageContract):
    pass


class TestS3(stores.S3, StorageContract):
    pass


class TestS3WithoutObstore(stores.S3WithoutObstore, StorageContract):
    pass


@pytest.mark.slow
class TestS3FarAway(stores.S3FarAway, StorageContract):
    pass


class TestS3WithTransientFaults(stores.S3WithTransientFaults, StorageContract):
    pass


class TestS3WithTransientFaultsWithoutObstore(stores.S3WithTransientFaultsWithoutObstore, StorageContract):
    pass


class TestSeaweedFS(stores.SeaweedFS, StorageContract):
    pass


class TestRclone(stores.Rclone, StorageContract):
    pass


class TestRcloneWithoutObstore(stores.RcloneWithoutObstore, StorageContract):
    pass


class TestJuiceFS(stores.JuiceFS, StorageContract):
    pass


class TestJuiceFSBehindNginx(stores.JuiceFSBehindNginx, StorageContract):
    pass


class TestJuiceFSBehindNginxWithoutObstore(stores.JuiceFSBehindNginxWithoutObstore, StorageContract):
    pass


class TestS3rver(stores.S3rver, StorageContract):
    pass


class TestS3rverWithoutObstore(stores.S3rverWithoutObstore, StorageContract):
    pass


class TestNanio(stores.Nanio, StorageContract):
    pass


class TestNanioWithoutObstore(stores.NanioWithoutObstore, StorageContract):
    pass


class TestGcs(stores.Gcs, StorageContract):
    pass


class TestZonal(stores.Zonal, StorageContract):
    pass


class TestAzure(stores.Azure, StorageContract):
    pass


class TestAzureWithoutObstore(stores.AzureWithoutObstore, StorageContract):
    pass


class TestSftp(stores.Sftp, StorageContract):
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


class TestFtp(stores.Ftp, StorageContract):
    pass


class TestWebHdfs(stores.WebHdfs, StorageContract):
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


class TestHdfs(stores.NativeHdfs, StorageContract):
    pass
