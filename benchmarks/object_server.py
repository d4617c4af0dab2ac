"""A small S3 server for measuring clients: it does as little as it can, and can be as far away as it is told to be.

Run it with ``python benchmarks/object_server.py [--latency-ms N] [--megabytes-per-s N]``: it prints its port on the
loopback interface, and ends when its standard input does. Every bucket exists. What is written to the bucket ``sink``
is discarded but for its size; other buckets keep their objects in memory. Signatures and checksums are not looked at.
``POST /-/reset`` forgets what has been logged, ``GET /-/log`` tells what was asked since, and what that cost.
"""

import argparse
import hashlib
import io
import itertools
import json
import os
import re
import sys
import threading
import time
from dataclasses import dataclass
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, quote, unquote
from xml.sax.saxutils import escape

from bodies import Chunked, Object, Piece, Sized, texts

SINK = "sink"
MIB = 1 << 20
STEP_SECONDS = 0.005
Place = tuple[str, str]


@dataclass(frozen=True)
class Link:
    """What lies between a client and the server.

    Attributes:
        latency: Seconds from a request to its response; once more for the first of a connection, as a handshake.
        rate: Bytes per second and connection, in each direction; 0 for no limit.
    """

    latency: float = 0.0
    rate: float = 0.0


class Refused(Exception):
    """An answer other than success."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


class Handler(BaseHTTPRequestHandler):
    """Serves one connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: "ObjectServer"

    def setup(self) -> None:
        super().setup()
        link = self.server.link
        self._buffer = memoryview(bytearray(min(MIB, int(link.rate * STEP_SECONDS)) or MIB))
        self._delay = 2 * link.latency
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
        self._delay = self.server.link.latency
        try:
            if key:
                self._object_request((bucket, key), body)
            else:
                self._bucket_request(bucket, body)
        except Refused as refused:
            self._answer(refused.status, f"<Error><Code>{refused.code}</Code></Error>".encode())

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_request

    def _bucket_request(self, bucket: str, body: Piece) -> None:
        if self.command == "GET":
            self._answer(200, self._listing(bucket).encode())
        elif self.command == "POST" and "delete" in self._query:
            keys = texts(body, "Key")
            for key in keys:
                self.server.objects.pop((bucket, key), None)
            deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
            self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())
        else:
            self._answer(200)

    def _object_request(self, place: Place, body: Piece) -> None:
        objects, uploads = self.server.objects, self.server.uploads
        if self.command == "POST" and "uploads" in self._query:
            upload = self.server.new_name()
            uploads[upload] = {}
            self._answer_xml("InitiateMultipartUploadResult", Bucket=place[0], Key=place[1], UploadId=upload)
        elif "uploadId" in self._query:
            self._upload_request(place, body)
        elif self.command == "PUT" and "x-amz-copy-source" in self.headers:
            bucket, _, key = unquote(self.headers["x-amz-copy-source"]).lstrip("/").partition("/")
            copy = self.server.put(place, self._find((bucket, key)).pieces)
            self._answer_xml("CopyObjectResult", ETag=copy.tag)
        elif self.command == "PUT":
            self._answer(200, headers={"ETag": self.server.put(place, [body]).tag})
        elif self.command == "DELETE":
            objects.pop(place, None)
            self._answer(204)
        else:
            self._get(self._find(place))

    def _upload_request(self, place: Place, body: Piece) -> None:
        uploads, upload = self.server.uploads, self._query["uploadId"]
        if upload not in uploads:
            raise Refused(404, "NoSuchUpload")
        if self.command == "PUT":
            uploads[upload][int(self._query["partNumber"])] = body
            self._answer(200, headers={"ETag": f'"{self.server.new_name()}"'})
            return
        parts = uploads.pop(upload)
        if self.command == "DELETE":
            self._answer(204)
            return
        numbers = [int(text) for text in texts(body, "PartNumber")]
        if not numbers or not parts.keys() >= set(numbers):
            raise Refused(400, "InvalidPart")
        done = self.server.put(place, [parts[number] for number in numbers])
        self._answer_xml("CompleteMultipartUploadResult", Bucket=place[0], Key=place[1], ETag=done.tag)

    def _find(self, place: Place) -> Object:
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

    def _listing(self, bucket: str) -> str:
        """What one request lists: objects, and common prefixes up to the delimiter, both by name."""
        prefix, delimiter = self._query.get("prefix", ""), self._query.get("delimiter", "")
        after = max(self._query.get(name, "") for name in ("marker", "start-after", "continuation-token"))
        coding = "<EncodingType>url</EncodingType>" if self._query.get("encoding-type") == "url" else ""
        entries: dict[str, str] = {}
        for place, found in sorted(self.server.objects.items()):
            key = place[1]
            cut = key.find(delimiter, len(prefix)) if delimiter else -1
            name = key if cut < 0 else key[: cut + len(delimiter)]
            if place[0] != bucket or not key.startswith(prefix) or name <= after:
                continue
            shown = quote(name) if coding else escape(name)
            modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(found.modified))
            entries[name] = (
                f"<Contents><Key>{shown}</Key><LastModified>{modified}</LastModified><ETag>{escape(found.tag)}</ETag>"
                f"<Size>{found.size}</Size></Contents>"
                if cut < 0
                else f"<CommonPrefixes><Prefix>{shown}</Prefix></CommonPrefixes>"
            )
        names = list(entries)[: int(self._query.get("max-keys", 1000))]
        more = len(names) < len(entries)
        token = f"<NextContinuationToken>{escape(names[-1])}</NextContinuationToken>" if more and names else ""
        return (
            f"<ListBucketResult><Name>{bucket}</Name><KeyCount>{len(names)}</KeyCount>{coding}"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{''.join(entries[name] for name in names)}"
            "</ListBucketResult>"
        )

    def _read_body(self, keep: bool) -> Piece:
        frame: io.RawIOBase
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            frame = Chunked(self.rfile)
        else:
            frame = Sized(self.rfile, int(self.headers.get("Content-Length") or 0))
        coded = self.headers.get("x-amz-content-sha256", "").startswith("STREAMING")
        content: Any = Chunked(io.BufferedReader(frame)) if coded else frame
        piece = Piece(keep)
        while count := content.readinto(self._buffer):
            self._pace(count)
            piece.append(self._buffer[:count])
        while frame.readinto(self._buffer):  # what follows the coded content
            pass
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
        if rate := self.server.link.rate:
            now = time.monotonic()
            self._due = max(self._due, now - STEP_SECONDS) + count / rate
            self.server.wait(self._due - now)

    def _answer_xml(self, kind: str, **content: str) -> None:
        inner = "".join(f"<{name}>{escape(text)}</{name}>" for name, text in content.items())
        self._answer(200, f"<{kind}>{inner}</{kind}>".encode())

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
    """Holds the objects, and a log of the requests."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, link: Link, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.link = link
        self.objects: dict[Place, Object] = {}
        self.uploads: dict[str, dict[int, Piece]] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting, self._since = 0, 0.0
        self._reset()

    def _reset(self) -> None:
        self._log: list[dict[str, Any]] = []
        self._cpu = time.process_time()
        self._waited = 0.0

    def new_name(self) -> str:
        """A name that was not given before, in the form of an MD5 digest, as that of an object's ETag."""
        return hashlib.md5(str(next(self._numbers)).encode()).hexdigest()

    def put(self, place: Place, pieces: list[Piece]) -> Object:
        self.objects[place] = Object(pieces, f'"{self.new_name()}"')
        return self.objects[place]

    def note(self, request: Handler, size: int) -> None:
        """Puts a request with a body of ``size`` bytes into the log."""
        digest = request.headers.get("x-amz-content-sha256", "")
        self._log.append(
            {
                "method": request.command,
                "path": request.path,
                "connection": request.client_address[1],
                "client": request.headers.get("User-Agent", ""),
                "payload": "SHA-256" if len(digest) == 64 else digest,
                "bytes": size,
            }
        )

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
            self._reset()
        return {"requests": self._log, "cpu_s": time.process_time() - self._cpu, "link_s": self._waited}

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # else the client has left
            super().handle_error(request, client_address)


def main() -> None:
    """Serves until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--latency-ms", type=float, default=0, help="milliseconds from a request to its response")
    parser.add_argument("--megabytes-per-s", type=float, default=0, help="10^6 bytes per second and connection")
    arguments = parser.parse_args()
    server = ObjectServer(Link(arguments.latency_ms / 1e3, arguments.megabytes_per_s * 1e6))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
