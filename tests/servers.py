"""Servers for the tests: S3 (moto, with a proxy before it that can refuse requests) and FTP."""

import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
from moto.server import ThreadedMotoServer
from pyftpdlib.authorizers import DummyAuthorizer
from pyftpdlib.handlers import FTPHandler
from pyftpdlib.servers import FTPServer

SECRET = "correct-horse-battery-staple"
Rule = Callable[[str, str], int | None]


class _Proxy(BaseHTTPRequestHandler):
    """Passes a request on, or answers it with the status that the server's ``rule`` gives for (method, path)."""

    protocol_version = "HTTP/1.1"
    server: Any

    def handle_request(self) -> None:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(iter(self._chunk, b""))
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append((self.command, self.path))
        status = self.server.rule(self.command, self.path)
        if status is not None:
            code = {403: "AccessDenied", 500: "InternalError", 503: "SlowDown"}[status]
            self._answer(status, [], f"<Error><Code>{code}</Code><Message>refused</Message></Error>".encode())
            return
        upstream = HTTPConnection(*self.server.target)
        kept = {name: value for name, value in self.headers.items() if name.lower() != "transfer-encoding"}
        upstream.request(self.command, self.path, body, {**kept, "Content-Length": str(len(body))})
        response = upstream.getresponse()
        self._answer(response.status, response.getheaders(), response.read())
        upstream.close()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_request

    def _chunk(self) -> bytes:
        size = int(self.rfile.readline().split(b";")[0], 16)
        data = self.rfile.read(size)
        self.rfile.readline()
        return data

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        length = dict(headers).get("Content-Length", str(len(body))) if self.command == "HEAD" else str(len(body))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Requests are kept in a list instead."""


@dataclass
class Server:
    """A running S3 server."""

    endpoint: str
    client: Any
    proxy: Any

    @property
    def environment(self) -> dict[str, str]:
        """What s3fs and boto read, and nothing of the user's own configuration."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": "does-not-exist",
            "AWS_SHARED_CREDENTIALS_FILE": "does-not-exist",
        }


@dataclass
class Bucket:
    """An empty bucket of its own for a test."""

    server: Server
    name: str = field(default_factory=lambda: f"bucket-{uuid.uuid4().hex[:12]}")

    def __post_init__(self) -> None:
        self.server.client.create_bucket(Bucket=self.name)

    @property
    def url(self) -> str:
        return f"s3://{self.name}"

    def names(self) -> list[str]:
        return sorted(
            entry["Key"] for entry in self.server.client.list_objects_v2(Bucket=self.name).get("Contents", [])
        )

    def empty(self) -> None:
        for name in self.names():
            self.server.client.delete_object(Bucket=self.name, Key=name)

    def get(self, key: str) -> bytes:
        return self.server.client.get_object(Bucket=self.name, Key=key)["Body"].read()

    def put(self, key: str, body: bytes) -> None:
        self.server.client.put_object(Bucket=self.name, Key=key, Body=body)

    def unfinished_uploads(self) -> list[str]:
        uploads = self.server.client.list_multipart_uploads(Bucket=self.name).get("Uploads", [])
        return [upload["Key"] for upload in uploads]

    @property
    def requests(self) -> list[tuple[str, str]]:
        """Method and path of all that was asked of this bucket through the endpoint, in order."""
        return [(method, path) for method, path in self.server.proxy.requests if path.startswith(f"/{self.name}")]

    @contextmanager
    def refusing(self, rule: Rule) -> Iterator[None]:
        """Answers a request with the status that ``rule`` gives for its method and path, if it is not None."""
        self.server.proxy.rule = rule
        try:
            yield
        finally:
            self.server.proxy.rule = _pass_all


def _pass_all(method: str, path: str) -> None:
    return None


@contextmanager
def s3_server() -> Iterator[Server]:
    """Starts moto and the proxy on free ports of the loopback interface."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    target = moto.get_host_and_port()
    proxy: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Proxy)
    proxy.target, proxy.rule, proxy.requests = target, _pass_all, []
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    client = boto3.client(
        "s3", endpoint_url=f"http://{target[0]}:{target[1]}", region_name="us-east-1",
        aws_access_key_id="test", aws_secret_access_key=SECRET,
    )  # fmt: skip
    try:
        yield Server(f"http://127.0.0.1:{proxy.server_port}", client, proxy)
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()
        moto.stop()


@contextmanager
def ftp_server(root: Path) -> Iterator[str]:
    """Serves ``root`` on a free port of the loopback interface, and gives the URL."""
    logging.getLogger("pyftpdlib").setLevel(logging.ERROR)
    authorizer = DummyAuthorizer()
    authorizer.add_user("user", SECRET, str(root), perm="elradfmwMT")
    handler = type("Handler", (FTPHandler,), {"authorizer": authorizer})
    running = FTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=running.serve_forever, kwargs={"timeout": 0.05, "handle_exit": False}, daemon=True)
    thread.start()
    try:
        yield f"ftp://user:{SECRET}@127.0.0.1:{running.address[1]}"
    finally:
        running.ioloop.call_later(0, running.close_all)
        thread.join(timeout=5)
