"""The stores that keep the contract for sharded checkpoints."""

import pytest

from tests.storage import stores
from tests.storage.sharded.sharded_contract import ShardedContract


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
