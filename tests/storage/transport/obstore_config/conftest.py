import logging
import os
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning.fabric.storage.transport import retry
from lightning.fabric.storage.transport.backends import obstore_config
from tests.storage.transport.obstore_config.recorder import Certificates, Recorder, recorder


@pytest.fixture(autouse=True)
def nothing_in_force(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of the user's own configuration is seen, nothing has been logged, and no request is repeated."""
    for name in os.environ:
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "FSSPEC_")) or name.upper().endswith("_PROXY"):
            monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(obstore_config, "_logged", set())
    monkeypatch.setattr(retry, "DEADLINE_S", 0)
    caplog.set_level(logging.INFO, logger=obstore_config.__name__)


@pytest.fixture
def records() -> Iterator[Recorder]:
    with recorder() as running:
        yield running


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def tls_records(certificates: Certificates) -> Iterator[Recorder]:
    with recorder(certificates.server) as running:
        yield running


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch, certificates: Certificates) -> None:
    """Python's own certificates include those of the tests; the system's, which obstore knows too, do not."""
    monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: SimpleNamespace(cafile=str(certificates.authority)))


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What has been logged about stores."""
    return lambda: [record.getMessage() for record in caplog.records if record.name == obstore_config.__name__]
