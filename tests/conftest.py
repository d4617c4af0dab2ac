import gc
import io
import os
import signal
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import s3fs
from botocore.loaders import JSONFileLoader
from fsspec.implementations.ftp import FTPFileSystem

from tests.servers import Bucket, Server, ftp_server, s3_server

# Several processes share the cores: threads of torch that wait for each other would only take them from these
os.environ.setdefault("OMP_NUM_THREADS", "1")

# gcsfs reads it when it is imported. Otherwise it asks Google over gRPC what kind a bucket is of, for five minutes
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

# A job in the background of a shell without job control ignores Ctrl-C, and so would all processes of the tests
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest.register_assert_rewrite(
    *(f"tests.accelerators.{name}" for name in ("beside", "optimizers", "reads", "staging", "training")),
    *(
        "tests.storage.contract",
        "tests.storage.sharded.sharded_contract",
        "tests.storage.states",
        "tests.storage.stores",
    ),
)

_read_model = JSONFileLoader.load_file
_models: dict[str, Any] = {}


def _read_model_once(loader: JSONFileLoader, path: str) -> Any:
    """What a file says of a service; each client reads that anew, which takes longer than most of what it is to do."""
    if path not in _models:
        _models[path] = _read_model(loader, path)
    return _models[path]


JSONFileLoader.load_file = _read_model_once


def pytest_collection_finish() -> None:
    """Keeps the collector away from modules and tests, which stay: to look through them takes most of its time.

    So it does when forked processes end, such as workers of data loaders, which copied all that memory for it.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_goes_on() -> Iterator[None]:
    """Fails a test that leaves saves in the background: the next one to wait for its own would raise their errors."""
    yield
    packages = [f"{fabric}.storage" for fabric in ("lightning.fabric", "lightning_fabric")]
    modules = [import_module(f"{package}.background.queue") for package in packages if package in sys.modules]
    left = [queue for module in modules for queue in tuple(module.busy)]
    for queue in left:
        queue.wait_until_idle()
    errors = [error for queue in left for error in queue.settle()]
    assert not left, f"There are saves or removals that nobody has waited for, which ended with {errors}"


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Unpack the released wheel of a distribution, named as for PACKAGE_NAME; once, so nobody may change it."""
    # not at the top: this file goes with the patches into Lightning's own repository, where there is no build of ours
    distribution = pytest.importorskip("build_backend.distribution")
    upstream = pytest.importorskip("build_backend.upstream")
    trees: dict[str, Path] = {}

    def unpack(name: str) -> Path:
        if name not in trees:
            trees[name] = tmp_path_factory.mktemp(name)
            with zipfile.ZipFile(io.BytesIO(upstream.read_pristine_wheel(distribution.PACKAGE_NAMES[name]))) as archive:
                archive.extractall(trees[name])
        return trees[name]

    return unpack


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with s3_server() as running:
        yield running


@pytest.fixture
def bucket(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """An empty S3 bucket, which this process and its children reach without further options."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    yield Bucket(server)
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def ftp(tmp_path: Path) -> Iterator[str]:
    """The URL of an FTP server: a real file system with folders and renames, which is not this machine's."""
    root = tmp_path / "ftp"
    root.mkdir()
    with ftp_server(root) as url:
        yield url
    FTPFileSystem.clear_instance_cache()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails is not tried again for minutes."""
    retry = pytest.importorskip("lightning.fabric.storage.transport.retry")
    monkeypatch.setattr(retry, "DEADLINE_S", 0.5)
    s3fs.S3FileSystem.clear_instance_cache()
