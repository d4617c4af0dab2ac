"""An object store in memory that keeps what it was sent: S3's and GCS's XML API, and Azure's blobs.

It takes any credentials. Which ones were used is what the tests ask it.
"""

import base64
import datetime
import hashlib
import hmac
import ipaddress
import re
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey as Key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

_AZURE_SIGNED_HEADERS = [
    *("content-encoding", "content-language", "content-length", "content-md5", "content-type", "date"),
    *("if-modified-since", "if-match", "if-none-match", "if-unmodified-since", "range"),
]


@dataclass
class Request:
    """What was sent. Names of headers are in lower case."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes = field(repr=False)

    @property
    def url(self) -> str:
        """With the host, which a proxy finds in the target itself."""
        return self.target if "://" in self.target else f"http://{self.headers['host']}{self.target}"

    @property
    def path(self) -> str:
        """Decoded, without the leading slash."""
        return unquote(urlsplit(self.url).path).lstrip("/")

    @property
    def query(self) -> dict[str, str]:
        return {name: values[0] for name, values in parse_qs(urlsplit(self.url).query, keep_blank_values=True).items()}

    @property
    def signer(self) -> str:
        """The access key and the region of an AWS signature."""
        scope = re.search(r"Credential=([^/]+)/\d+/([^/]+)/", self.headers["authorization"])
        assert scope is not None
        return f"{scope[1]} in {scope[2]}"

    def is_signed_with(self, account: str, key: str) -> bool:
        """Whether the signature is that of an account key of Azure."""
        headers = dict(self.headers)
        if headers.get("content-length") == "0":
            headers["content-length"] = ""
        own = sorted((name, value) for name, value in headers.items() if name.startswith("x-ms-"))
        lines = [self.method, *(headers.get(name, "") for name in _AZURE_SIGNED_HEADERS)]
        lines += [f"{name}:{value}" for name, value in own]
        lines += [f"/{account}{urlsplit(self.url).path}"]
        lines += [f"{name}:{value}" for name, value in sorted(self.query.items())]
        digest = hmac.digest(base64.b64decode(key), "\n".join(lines).encode(), hashlib.sha256)
        return self.headers["authorization"] == f"SharedKey {account}:{base64.b64encode(digest).decode()}"


Answer = tuple[int, dict[str, str]]


class Recorder(ThreadingHTTPServer):
    """The server. ``rule`` may answer a request in its place."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[Request] = []
        self.objects: dict[str, bytes] = {}
        self.parts: dict[str, dict[str, bytes]] = {}
        self.rule: Callable[[Request], Answer | None] = lambda request: None
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is what some tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Recorder

    def handle_request(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, self.path, headers, body)
        self.server.requests.append(request)
        answer = self.server.rule(request)
        if answer is None:
            self._store(request)
        else:
            self._answer(answer[0], b"", answer[1])

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_request

    def _store(self, request: Request) -> None:
        query, objects = request.query, self.server.objects
        parts = self.server.parts.setdefault(request.path, {})
        if request.method == "DELETE":
            self._answer(204)
        elif request.method == "POST" and "uploads" in query:
            self._answer(200, b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>")
        elif request.method == "PUT" and (name := query.get("partNumber") or query.get("blockid")):
            parts[name] = request.body
            self._answer(201 if "blockid" in query else 200)
        elif "uploadId" in query or query.get("comp") == "blocklist":
            tree = ElementTree.fromstring(request.body)
            named = [str(node.text) for node in tree.iter() if re.search("PartNumber|Latest|Uncommitted", node.tag)]
            objects[request.path] = b"".join(parts[name] for name in named)
            self._answer(
                201 if "comp" in query else 200,
                b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>",
            )
        elif request.method == "PUT":
            objects[request.path] = request.body
            self._answer(201 if "x-ms-blob-type" in request.headers else 200)
        else:
            self._read(request)

    def _read(self, request: Request) -> None:
        data = self.server.objects.get(request.path)
        if data is None:
            self._answer(404)
            return
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", ""))
        if wanted is None:
            self._answer(200, data)
            return
        start, end = int(wanted[1]), min(int(wanted[2]) + 1, len(data))
        self._answer(206, data[start:end], {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}"})

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        common = {"ETag": '"x"', "Last-Modified": "Wed, 01 Jan 2025 00:00:00 GMT", "Content-Length": str(len(body))}
        for name, value in {**common, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Requests are kept in a list instead."""


@contextmanager
def recorder(certificate: Path | None = None) -> Iterator[Recorder]:
    """Starts a server, with TLS if there is a certificate."""
    server = Recorder()
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        server.url = server.url.replace("http:", "https:")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass
class Certificates:
    """Files: that of the authority, which a client has to trust, and the server's with its key."""

    authority: Path
    server: Path

    @classmethod
    def make(cls, folder: Path) -> "Certificates":
        """Makes them for the loopback address."""
        authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
        files = cls(folder / "authority.pem", folder / "server.pem")
        address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        signed = _sign("server", server, address, "authority", authority)
        own = _sign("authority", authority, x509.BasicConstraints(True, None), "authority", authority)
        files.authority.write_bytes(own.public_bytes(Encoding.PEM))
        key = server.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        files.server.write_bytes(signed.public_bytes(Encoding.PEM) + key)
        return files


def _sign(name: str, key: Key, extension: x509.ExtensionType, issuer: str, issuers_key: Key) -> x509.Certificate:
    now = datetime.datetime.now(datetime.timezone.utc)
    subject, authority = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in (name, issuer))
    builder = x509.CertificateBuilder(authority, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(days=1))
    builder = builder.not_valid_after(now + datetime.timedelta(days=1))
    return builder.add_extension(extension, critical=True).sign(issuers_key, hashes.SHA256())
