"""The stores that keep the contract for sharded checkpoints."""

import re

import pytest

from lightning.fabric.storage.archives.save import save_file
from tests.storage import stores
from tests.storage.places import Store
from tests.storage.sharded.sharded_contract import Job, ShardedContract, saved


class TestLocal(stores.Local, ShardedContract):
    pass


class TestMemory(stores.InMemory, ShardedContract):
    pass


class TestS3(stores.S3, ShardedContract):
    pass


class TestS3WithoutObstore(stores.S3WithoutObstore, ShardedContract):
    pass


@pytest.mark.slow
class TestSeaweedFS(stores.SeaweedFS, ShardedContract):
    pass


class TestRclone(stores.Rclone, ShardedContract):
    pass


class TestRcloneWithoutObstore(stores.RcloneWithoutObstore, ShardedContract):
    pass


class TestJuiceFS(stores.JuiceFS, ShardedContract):
    pass


class TestJuiceFSBehindNginx(stores.JuiceFSBehindNginx, ShardedContract):
    pass


class TestJuiceFSBehindNginxWithoutObstore(stores.JuiceFSBehindNginxWithoutObstore, ShardedContract):
    pass


class TestS3rver(stores.S3rver, ShardedContract):
    pass


class TestS3rverWithoutObstore(stores.S3rverWithoutObstore, ShardedContract):
    pass


class TestNanio(stores.Nanio, ShardedContract):
    @pytest.mark.usefixtures("impatient")
    def test_an_error_says_that_a_file_and_a_folder_cannot_have_one_name(self, store: Store) -> None:
        store.outside.put("run/file.ckpt", b"a file")
        saved(store.url, 1)
        with pytest.raises(OSError, match=r"a file and a folder have one name.*save to another path, or remove"):
            save_file({}, store.url)
        for error in Job().save(f"{store.root}/run/file.ckpt", 2):
            assert re.search("a file and a folder have one name", str(error))
        assert Job().load(store.url) == 1


class TestNanioWithoutObstore(stores.NanioWithoutObstore, ShardedContract):
    pass


class TestGcs(stores.Gcs, ShardedContract):
    pass


class TestZonal(stores.Zonal, ShardedContract):
    pass


class TestAzure(stores.Azure, ShardedContract):
    pass


class TestAzureWithoutObstore(stores.AzureWithoutObstore, ShardedContract):
    pass


class TestSftp(stores.Sftp, ShardedContract):
    pass


class TestFtp(stores.Ftp, ShardedContract):
    pass


class TestWebHdfs(stores.WebHdfs, ShardedContract):
    pass


class TestHdfs(stores.NativeHdfs, ShardedContract):
    pass
