"""A small S3 server for measuring clients: it does as little as it can, and can be as far away as it is told to be.

Run it with ``python benchmarks/object_server.py [--latency-ms N] [--megabytes-per-s N]``: it prints its port on the
loopback interface, and ends when its standard input does; :func:`serving` does that. Every bucket exists. What is
written to the bucket ``sink`` is discarded but for its size; other buckets keep their objects in memory. Signatures and
checksums are not looked at. ``POST /-/reset`` forgets what has been logged, ``GET /-/log`` tells what was asked since,
and what that cost.
"""

import argparse
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

SINK = "sink"
MIB = 1 << 20
STEP_SECONDS = 0.005
Key = tuple[str, str]


class Piece:
    """A part of an object: an anonymous file in memory, or only the size of what was discarded."""

    def __init__(self, keep: bool) -> None:
        self.size = 0
        self.file = os.memfd_create("piece") if keep else None

    def append(self, data: memoryview) -> None:
        self.size += len(data)
        while self.file is not None and data:
            data = data[os.write(self.file, data) :]

    def texts(self, name: str) -> list[str]:
        """What the elements of that name hold in an XML document."""
        assert self.file is not None
        document = ElementTree.fromstring(os.pread(self.file, self.size, 0))
        return [element.text or "" for element in document.findall(f".//{{*}}{name}")]

    def __del__(self) -> None:
        if self.file is not None:
            os.close(self.file)


@dataclass
class Object:
    """A complete object."""

    pieces: list[Piece]
    tag: str
    modified: float = field(default_factory=time.time)

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


class Refused(Exception):
    """An answer other than success: a status, and S3's code of the error."""


def xml(kind: str, content: str = "", **texts: str) -> bytes:
    inner = "".join(f"<{name}>{escape(text)}</{name}>" for name, text in texts.items())
    return f"<{kind}>{inner}{content}</{kind}>".encode()


class Handler(BaseHTTPRequestHandler):
    """Serves one connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: "ObjectServer"

    def setup(self) -> None:
        super().setup()
        self._buffer = memoryview(bytearray(min(MIB, int(self.server.rate * STEP_SECONDS)) or MIB))
        self._delay = 2 * self.server.latency
        self._due = 0.0

    def handle_request(self) -> None:
        path, _, query = self.path.partition("?")
        bucket, _, key = unquote(path)[1:].partition("/")
        if bucket == "-":
            self._answer(200, json.dumps(self.server.control(self.command, key)).encode())
            return
        self._query = dict(parse_qsl(query, keep_blank_values=True))
        body = self._read_body(keep=bucket != SINK or self.command == "POST")
        self.server.note(self, body.size)
        self.server.wait(self._delay)
        self._delay = self.server.latency
        try:
            if "Transfer-Encoding" in self.headers or "aws-chunked" in self.headers.get("Content-Encoding", ""):
                self.close_connection = True  # its body has not been read: over plain http no client sends any
                raise Refused(501, "NotImplemented")
            if key:
                self._object_request((bucket, key), body)
            else:
                self._bucket_request(bucket, body)
        except Refused as refused:
            status, code = refused.args
            self._answer(status, xml("Error", Code=code))

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_request

    def _bucket_request(self, bucket: str, body: Piece) -> None:
        if self.command == "GET":
            self._answer(200, self._listing(bucket))
        elif self.command == "POST" and "delete" in self._query:
            keys = body.texts("Key")
            for key in keys:
                self.server.objects.pop((bucket, key), None)
            self._answer(200, xml("DeleteResult", "".join(xml("Deleted", Key=key).decode() for key in keys)))
        else:
            self._answer(200)

    def _object_request(self, place: Key, body: Piece) -> None:
        if "uploads" in self._query:
            upload = self.server.new_name()
            self.server.uploads[upload] = {}
            self._answer(200, xml("InitiateMultipartUploadResult", Bucket=place[0], Key=place[1], UploadId=upload))
        elif "uploadId" in self._query:
            self._upload_request(place, body)
        elif self.command == "PUT" and "x-amz-copy-source" in self.headers:
            bucket, _, key = unquote(self.headers["x-amz-copy-source"]).lstrip("/").partition("/")
            copy = self.server.put(place, self._find((bucket, key)).pieces)
            self._answer(200, xml("CopyObjectResult", ETag=copy.tag))
        elif self.command == "PUT":
            self._answer(200, headers={"ETag": self.server.put(place, [body]).tag})
        elif self.command == "DELETE":
            self.server.objects.pop(place, None)
            self._answer(204)
        else:
            self._get(self._find(place))

    def _upload_request(self, place: Key, body: Piece) -> None:
        uploads, upload = self.server.uploads, self._query["uploadId"]
        if upload not in uploads:
            raise Refused(404, "NoSuchUpload")
        if self.command == "PUT":
            uploads[upload][int(self._query["partNumber"])] = body
            self._answer(200, headers={"ETag": f'"{self.server.new_name()}"'})
        elif self.command == "DELETE":
            del uploads[upload]
            self._answer(204)
        else:
            parts, numbers = uploads.pop(upload), [int(text) for text in body.texts("PartNumber")]
            if not numbers or not parts.keys() >= set(numbers):
                raise Refused(400, "InvalidPart")
            done = self.server.put(place, [parts[number] for number in numbers])
            self._answer(200, xml("CompleteMultipartUploadResult", Bucket=place[0], Key=place[1], ETag=done.tag))

    def _find(self, place: Key) -> Object:
        if place not in self.server.objects:
            raise Refused(404, "NoSuchKey")
        return self.server.objects[place]

    def _get(self, found: Object) -> None:
        if self.headers.get("If-Match", found.tag) != found.tag:
            raise Refused(412, "PreconditionFailed")
        start, end, status = 0, found.size, 200
        headers = {"ETag": found.tag, "Last-Modified": formatdate(found.modified, usegmt=True)}
        if asked := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")):
            first, last = asked.groups()
            start = int(first) if first else max(found.size - int(last), 0)
            end = min(int(last) + 1, found.size) if first and last else found.size
            if start >= end:
                raise Refused(416, "InvalidRange")
            status = 206
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{found.size}"
        if self.command == "GET" and any(piece.file is None for piece in found.pieces):
            raise Refused(400, "BodyWasDiscarded")
        self._answer(status, length=end - start, headers=headers)
        if self.command == "GET":
            self._send(found.pieces, start, end)

    def _listing(self, bucket: str) -> bytes:
        """All objects, in one answer, and common prefixes up to the delimiter, by name."""
        prefix, delimiter = self._query.get("prefix", ""), self._query.get("delimiter", "")
        entries: dict[str, bytes] = {}
        for (its_bucket, key), found in sorted(self.server.objects.items()):
            if its_bucket != bucket or not key.startswith(prefix):
                continue
            cut = key.find(delimiter, len(prefix)) if delimiter else -1
            name = key if cut < 0 else key[: cut + len(delimiter)]
            if cut < 0:
                modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(found.modified))
                entries[name] = xml("Contents", Key=name, LastModified=modified, ETag=found.tag, Size=str(found.size))
            else:
                entries[name] = xml("CommonPrefixes", Prefix=name)
        content = b"".join(entries.values()).decode()
        return xml("ListBucketResult", content, Name=bucket, KeyCount=str(len(entries)), IsTruncated="false")

    def _read_body(self, keep: bool) -> Piece:
        piece, left = Piece(keep), int(self.headers.get("Content-Length") or 0)
        while left:
            count = self.rfile.readinto(self._buffer[:left])  # type: ignore[attr-defined]
            if not count:
                raise ConnectionError("the client has left in the middle of a body")
            self._pace(count)
            piece.append(self._buffer[:count])
            left -= count
        return piece

    def _send(self, pieces: list[Piece], start: int, end: int) -> None:
        for piece in pieces:
            at, until = max(start, 0), min(end, piece.size)
            while at < until:
                assert piece.file is not None
                count = os.sendfile(self.connection.fileno(), piece.file, at, min(until - at, len(self._buffer)))
                self._pace(count)
                at += count
            start, end = start - piece.size, end - piece.size

    def _pace(self, count: int) -> None:
        """Waits until a link of the given rate would have passed ``count`` bytes more."""
        if rate := self.server.rate:
            now = time.monotonic()
            self._due = max(self._due, now - STEP_SECONDS) + count / rate
            self.server.wait(self._due - now)

    def _answer(
        self, status: int, body: bytes = b"", length: int | None = None, headers: dict[str, str] | None = None
    ) -> None:
        """Sends a response; with ``length``, only the head of one."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """The server keeps a log of its own."""


class ObjectServer(ThreadingHTTPServer):
    """Holds the objects, and a log of the requests.

    Args:
        latency: Seconds from a request to its response; once more for the first of a connection, as a handshake.
        rate: Bytes per second and connection, in each direction; 0 for no limit.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, latency: float, rate: float) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.latency, self.rate = latency, rate
        self.objects: dict[Key, Object] = {}
        self.uploads: dict[str, dict[int, Piece]] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting, self._since = 0, 0.0
        self.control("POST", "reset")

    def new_name(self) -> str:
        """Returns a name that was not given before, in the form of an MD5 digest, as that of an object's ETag."""
        return hashlib.md5(str(next(self._numbers)).encode()).hexdigest()

    def put(self, place: Key, pieces: list[Piece]) -> Object:
        self.objects[place] = Object(pieces, f'"{self.new_name()}"')
        return self.objects[place]

    def note(self, request: Handler, size: int) -> None:
        """Puts a request with a body of ``size`` bytes into the log."""
        digest = request.headers.get("x-amz-content-sha256", "")
        entry = {"method": request.command, "connection": request.client_address[1], "bytes": size}
        entry["client"] = request.headers.get("User-Agent", "")
        self._log.append({**entry, "payload": "SHA-256" if len(digest) == 64 else digest})

    def wait(self, seconds: float) -> None:
        """Lets the link take its time, and sums up when it keeps anybody waiting."""
        if seconds <= 0:
            return
        with self._lock:
            self._since = self._since if self._waiting else time.monotonic()
            self._waiting += 1
        time.sleep(seconds)
        with self._lock:
            self._waiting -= 1
            if not self._waiting:
                self._waited += time.monotonic() - self._since

    def control(self, method: str, what: str) -> dict[str, Any]:
        """Answers what is asked of the server itself."""
        if (method, what) == ("POST", "reset"):
            self._log: list[dict[str, Any]] = []
            self._cpu, self._waited = time.process_time(), 0.0
        return {"requests": self._log, "cpu_s": time.process_time() - self._cpu, "link_s": self._waited}

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # else the client has left
            super().handle_error(request, client_address)


@dataclass(frozen=True)
class RunningServer:
    """A server in a process of its own."""

    port: int

    def ask(self, method: str, what: str) -> dict[str, Any]:
        connection = HTTPConnection("127.0.0.1", self.port)
        connection.request(method, f"/-/{what}")
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
        connection.close()
        return answer


@contextmanager
def serving(latency_ms: float = 0, megabytes_per_s: float = 0) -> Iterator[RunningServer]:
    """Runs a server while the body does."""
    options = ["--latency-ms", str(latency_ms), "--megabytes-per-s", str(megabytes_per_s)]
    command = [sys.executable, __file__, *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield RunningServer(int(process.stdout.readline()))  # leaving closes its standard input, which ends it


def main() -> None:
    """Serves until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--latency-ms", type=float, default=0, help="milliseconds from a request to its response")
    parser.add_argument("--megabytes-per-s", type=float, default=0, help="10^6 bytes per second and connection")
    arguments = parser.parse_args()
    server = ObjectServer(arguments.latency_ms / 1e3, arguments.megabytes_per_s * 1e6)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
