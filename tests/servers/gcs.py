"""Google Cloud Storage's JSON API: gcp-storage-emulator."""

import logging
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import HTTPServer
from typing import Any

from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage
from google.auth.credentials import AnonymousCredentials
from google.cloud.storage import Client

PROJECT = "test"


@dataclass
class GcsServer:
    """A running emulator."""

    endpoint: str
    client: Any

    @property
    def environment(self) -> dict[str, str]:
        """What gcsfs reads, beside its credentials."""
        return {"STORAGE_EMULATOR_HOST": self.endpoint, "GOOGLE_CLOUD_PROJECT": PROJECT}


@dataclass
class GcsBucket:
    """An empty bucket of its own for a test, seen by Google's own client."""

    server: GcsServer
    name: str = field(default_factory=lambda: f"bucket-{uuid.uuid4().hex[:12]}")

    def __post_init__(self) -> None:
        self._bucket = self.server.client.create_bucket(self.name)

    @property
    def url(self) -> str:
        return f"gs://{self.name}"

    def names(self) -> list[str]:
        return sorted(blob.name for blob in self.server.client.list_blobs(self.name))

    def get(self, name: str) -> bytes:
        content: bytes = self._bucket.blob(name).download_as_bytes()
        return content

    def put(self, name: str, content: bytes) -> None:
        self._bucket.blob(name).upload_from_string(content)

    def remove(self, name: str) -> None:
        self._bucket.blob(name).delete()

    def unfinished_uploads(self) -> list[str]:
        """Nothing: a resumable session has no name and no bill, and goes away by itself."""
        return []


class _Handler(RequestHandler):
    disable_nagle_algorithm = True  # else a body waits 40 ms until the client has acknowledged the headers

    def do_DELETE(self) -> None:
        if "upload_id=" not in self.path:
            super().do_DELETE()
            return
        self.send_response(499)  # as Google answers who gives an upload up; the emulator does not know how
        self.send_header("Content-Length", "0")
        self.end_headers()


class _Server(HTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of clients that go away before they have an answer."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def gcs_server() -> Iterator[GcsServer]:
    """Starts the emulator on a free port of the loopback interface."""
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    server = _Server(("127.0.0.1", 0), partial(_Handler, Storage(use_memory_fs=True)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    client = Client(project=PROJECT, credentials=AnonymousCredentials(), client_options={"api_endpoint": endpoint})
    try:
        yield GcsServer(endpoint, client)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
