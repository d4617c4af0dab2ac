"""A proxy before an HTTP server, which can refuse, delay, drop, change and cut short what passes through it."""

import enum
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Fault(enum.Enum):
    """What can happen to a request besides an error of the server."""

    RESET = "the connection is closed instead of an answer"
    CUT = "the connection is closed in the middle of the answer's body"
    LOST = "the server does what it was asked to, and the connection is closed instead of its answer"
    GARBLED = "the server does what it was asked to, and something else comes instead of its answer"
    WHOLE = "the answer holds the range that was asked for, and says that it is the whole, of which it has the checksum"


@dataclass(frozen=True)
class Refusal:
    """An answer in the words of a store."""

    status: int
    body: str

    @classmethod
    def of_s3(cls, status: int, code: str, message: str) -> "Refusal":
        return cls(status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>")


#: What happens to the request with a method and a path: a status to answer with, or more than that, a fault, or None to
#: let it pass.
Rule = Callable[[str, str], int | Refusal | Fault | None]
#: What becomes of the headers of a request, whose names are in lower case: others, or a status to refuse it with.
Filter = Callable[[dict[str, str]], dict[str, str] | int]

_CODES = {
    **{400: "InvalidRequest", 403: "AccessDenied", 404: "NoSuchUpload", 405: "MethodNotAllowed"},
    **{429: "TooManyRequests", 500: "InternalError", 501: "NotImplemented", 503: "SlowDown"},
}


class Proxy(ThreadingHTTPServer):
    """Passes on what comes, and keeps the method and path of each request, and its headers."""

    def __init__(self, target: tuple[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = target
        self.requests: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.rule: Rule = pass_all
        self.filter: Filter = keep_all
        #: Ids of keys of AWS that have expired.
        self.expired: set[str] = set()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of clients that go away before they have an answer."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    @contextmanager
    def following(self, rule: Rule) -> Iterator[None]:
        self.rule = rule
        try:
            yield
        finally:
            self.rule = pass_all

    @contextmanager
    def filtering(self, names: Filter) -> Iterator[None]:
        self.filter = names
        try:
            yield
        finally:
            self.filter = keep_all


def pass_all(method: str, path: str) -> None:
    return None


def keep_all(headers: dict[str, str]) -> dict[str, str]:
    return headers


def drop(pattern: str) -> Filter:
    """Drops the headers whose name ``pattern`` is found in. The server refuses a signature that one of them is in."""

    def without(headers: dict[str, str]) -> dict[str, str] | int:
        kept = {name: value for name, value in headers.items() if not re.search(pattern, name)}
        signed = re.search("SignedHeaders=([^,]*)", headers.get("authorization", ""))
        return kept if signed is None or kept.keys() >= headers.keys() & set(signed[1].split(";")) else 403

    return without


def refuse(pattern: str, status: int) -> Filter:
    """Refuses requests with a header whose name ``pattern`` is found in."""
    return lambda headers: status if any(re.search(pattern, name) for name in headers) else headers


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms until the client has acknowledged the headers
    server: Any

    def handle_request(self) -> None:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(iter(self._chunk, b""))
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append((self.command, self.path))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.headers.append(headers)
        outcome = self.server.rule(self.command, self.path)
        passed = self.server.filter(headers)
        outcome = passed if isinstance(passed, int) else outcome
        has_expired = any(f"Credential={key}/" in headers.get("authorization", "") for key in self.server.expired)
        outcome = 400 if has_expired else outcome
        if outcome is Fault.RESET:
            self.close_connection = True
        elif isinstance(outcome, Refusal):
            self._answer(outcome.status, [], outcome.body.encode())
        elif isinstance(outcome, int):
            code = "ExpiredToken" if has_expired else _CODES[outcome]
            error = f"<Error><Code>{code}</Code><Message>refused</Message></Error>"
            self._answer(outcome, [], error.encode())
        else:
            upstream = HTTPConnection(*self.server.target)
            passed.pop("transfer-encoding", None)
            upstream.request(self.command, self.path, body, {**passed, "content-length": str(len(body))})
            response = upstream.getresponse()
            answer = response.read()
            if outcome is Fault.GARBLED:
                answer = b"<html>what?</html>"
            status, answered = response.status, response.getheaders()
            if outcome is Fault.WHOLE and status == 206:
                status = 200
                size = int(str(response.getheader("Content-Range")).rpartition("/")[2])
                if "x-amz-checksum-mode" in headers and len(answer) < size:
                    answered.append(("x-amz-checksum-crc32", "AAAAAA=="))  # which is hardly that of the range
            if outcome is Fault.LOST:
                self.close_connection = True
            else:
                self._answer(status, answered, answer, cut=outcome is Fault.CUT)
            upstream.close()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do_PATCH = handle_request

    def _chunk(self) -> bytes:
        size = int(self.rfile.readline().split(b";")[0], 16)
        data = self.rfile.read(size)
        self.rfile.readline()
        return data

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, cut: bool = False) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        length = dict(headers).get("Content-Length", str(len(body))) if self.command == "HEAD" else str(len(body))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True

    def log_message(self, *args: Any) -> None:
        """Requests are kept in a list instead."""


@contextmanager
def proxy_before(target: tuple[str, int]) -> Iterator[Proxy]:
    """Starts a proxy before the server at ``target``, on a free port of the loopback interface."""
    proxy = Proxy(target)
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()
