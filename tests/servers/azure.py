"""Azure Blob Storage: azurite, which npm brings; see `make test-azure`."""

import base64
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from azure.storage.blob import BlobServiceClient

from tests.servers.credentials import SECRET
from tests.servers.processes import free_ports, running

#: Where `make test-azure` puts it.
PROGRAM = Path(__file__).parents[2] / "build/azurite/node_modules/azurite/dist/src/blob/main.js"
MISSING = "azurite is not installed: `make test-azure` installs it with npm, and runs these tests"
ACCOUNT = "test"
KEY = base64.b64encode(SECRET.encode()).decode()


def is_installed() -> bool:
    return PROGRAM.is_file() and shutil.which("node") is not None


@dataclass
class AzureServer:
    """A running azurite."""

    endpoint: str
    client: Any

    @property
    def connection_string(self) -> str:
        return (
            f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
            f"BlobEndpoint={self.endpoint}/{ACCOUNT};"
        )

    @property
    def environment(self) -> dict[str, str]:
        """What adlfs reads."""
        return {"AZURE_STORAGE_CONNECTION_STRING": self.connection_string}


@dataclass
class Container:
    """An empty container of its own for a test, seen by Microsoft's own client."""

    server: AzureServer
    name: str = field(default_factory=lambda: f"container-{uuid.uuid4().hex[:12]}")

    def __post_init__(self) -> None:
        self._container = self.server.client.create_container(self.name)

    @property
    def url(self) -> str:
        return f"az://{self.name}"

    def names(self) -> list[str]:
        return sorted(blob.name for blob in self._container.list_blobs())

    def get(self, name: str) -> bytes:
        content: bytes = self._container.download_blob(name).readall()
        return content

    def put(self, name: str, content: bytes) -> None:
        self._container.upload_blob(name, content, overwrite=True)

    def remove(self, name: str) -> None:
        self._container.delete_blob(name)

    def unfinished_uploads(self) -> list[str]:
        """Nothing: blocks that were never committed are invisible, and Azure drops them after a week."""
        return []


@contextmanager
def azure_server(folder: Path) -> Iterator[AzureServer]:
    """Starts azurite, which keeps what it has in ``folder``."""
    (port,) = free_ports(1)
    server = AzureServer(f"http://127.0.0.1:{port}", None)
    server.client = BlobServiceClient.from_connection_string(server.connection_string)
    command = ["node", str(PROGRAM), "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder)]
    command += ["--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    environment = {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}
    with running(
        command, folder, lambda: socket.create_connection(("127.0.0.1", port), timeout=1).close(), environment
    ):
        yield server
