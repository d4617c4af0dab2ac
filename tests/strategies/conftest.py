from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import Bucket
from tests.strategies.forks import Forks, fork_server
from tests.strategies.places import S3, Local
from tests.strategies.trainings import Runs


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    with fork_server(tmp_path_factory.mktemp("forks")) as running:
        yield running


@pytest.fixture
def runs(tmp_path: Path, forks: Forks) -> Runs:
    return Runs(tmp_path, forks)


@pytest.fixture
def local(forks: Forks, tmp_path: Path) -> Local:
    return Local(forks, tmp_path)


@pytest.fixture
def s3(forks: Forks, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> S3:
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)  # small shards go up in parts, too
    return S3(forks, bucket)
