"""Google Cloud Storage's Rapid (zonal) buckets: appendable objects over gRPC, and what else gcsfs asks for.

It speaks as much of the protocol as Google's own client does: bidirectional streams to write and to read, folders, the
kind of a bucket, and over HTTP what objects there are, removals and renames. What has been sent and not been flushed is
lost when a stream breaks, as Google reserves the right to.
"""

import base64
import json
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import google_crc32c
import grpc
import pytest
from fsspec.registry import _registry
from gcsfs.extended_gcsfs import ExtendedGcsFileSystem
from google.api_core.client_options import ClientOptions
from google.auth.credentials import AnonymousCredentials
from google.cloud import _storage_v2 as storage
from google.cloud import storage_control_v2 as control
from google.cloud.storage.asyncio.async_grpc_client import AsyncGrpcClient
from google.protobuf import empty_pb2, timestamp_pb2

_ANSWER = 2 * 2**20


class Broken(Exception):
    """A stream or a request ends with the status UNAVAILABLE."""


class Refused(Exception):
    """A request is refused for good."""


class Damaged(Exception):
    """A byte of what arrived is stored wrong, and nobody notices."""


class Lost(Exception):
    """What arrived is forgotten, though it was flushed."""


@dataclass
class _Object:
    generation: int
    data: bytearray = field(default_factory=bytearray)
    persisted: int = 0
    finalized: bool = False


@dataclass
class ZonalServer:
    """A running server, and all that it stores."""

    grpc_address: str = ""
    endpoint: str = ""
    #: Called before and after each step, as in ``"before append"``: see :meth:`_Service.write` and the handler's
    #: methods. It raises what is to happen.
    fault: Callable[[str], None] = lambda step: None
    #: The sizes of the pieces of data in messages to write, and of the ranges that were asked for.
    written: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    objects: dict[tuple[str, str], _Object] = field(default_factory=dict)
    folders: set[tuple[str, str]] = field(default_factory=set)
    buckets: set[str] = field(default_factory=set)
    lock: Any = field(default_factory=threading.RLock)
    _generations: Any = field(default_factory=partial(count, 1))

    def create(self, bucket: str, name: str) -> _Object:
        with self.lock:
            parents = name.split("/")[:-1]
            self.folders |= {(bucket, "/".join(parents[: i + 1])) for i in range(len(parents))}
            self.objects[bucket, name] = new = _Object(next(self._generations))
            return new

    @contextmanager
    def failing(self, fault: Callable[[str], None]) -> Iterator[None]:
        """What happens to requests while the context lasts, see :attr:`fault`."""
        before, self.fault = self.fault, fault
        try:
            yield
        finally:
            self.fault = before


@dataclass
class ZonalBucket:
    """An empty bucket of its own for a test, seen in the server's memory."""

    server: ZonalServer
    name: str = field(default_factory=lambda: f"zonal-{uuid.uuid4().hex[:12]}")

    def __post_init__(self) -> None:
        self.server.buckets.add(self.name)

    @property
    def url(self) -> str:
        return f"gs://{self.name}"

    def names(self) -> list[str]:
        with self.server.lock:
            return sorted(name for bucket, name in self.server.objects if bucket == self.name)

    def get(self, name: str) -> bytes:
        with self.server.lock:
            found = self.server.objects[self.name, name]
            return bytes(found.data[: found.persisted])

    def put(self, name: str, content: bytes) -> None:
        with self.server.lock:
            new = self.server.create(self.name, name)
            new.data[:], new.persisted, new.finalized = content, len(content), True

    def remove(self, name: str) -> None:
        with self.server.lock:
            del self.server.objects[self.name, name]

    def unfinished_uploads(self) -> list[str]:
        """Objects that could still be appended to."""
        return [name for name in self.names() if not self.server.objects[self.name, name].finalized]


def _resource(bucket: str, name: str, found: _Object) -> Any:
    resource = storage.Object(
        name=name, bucket=f"projects/_/buckets/{bucket}", generation=found.generation, size=found.persisted
    )
    if found.finalized:
        resource.finalize_time = timestamp_pb2.Timestamp(seconds=found.generation)
        resource.checksums = storage.ObjectChecksums(crc32c=google_crc32c.value(bytes(found.data)))
    return resource


class _Service:
    """The methods of gRPC."""

    def __init__(self, server: ZonalServer) -> None:
        self._server = server

    def _find(self, bucket: str, name: str, context: Any, generation: int = 0) -> tuple[str, str, _Object]:
        bucket = bucket.rpartition("/")[2]
        found = self._server.objects.get((bucket, name))
        if found is None or generation not in (0, found.generation):
            context.abort(grpc.StatusCode.NOT_FOUND, f"{bucket}/{name} generation {generation}")
        return bucket, name, found

    def write(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        """The steps are "create", "append" (an existing object), "data" and "finish"."""
        target = None
        try:
            for request in requests:
                if request.HasField("write_object_spec"):
                    self._server.fault("before create")
                    resource = request.write_object_spec.resource
                    bucket, name = resource.bucket.rpartition("/")[2], resource.name
                    if bucket not in self._server.buckets:
                        context.abort(grpc.StatusCode.NOT_FOUND, "The specified bucket does not exist.")
                    target = self._server.create(bucket, name)
                    yield self._answer(resource=_resource(bucket, name, target))
                elif request.HasField("append_object_spec"):
                    self._server.fault("before append")
                    spec = request.append_object_spec
                    bucket, name, target = self._find(spec.bucket, spec.object_, context, spec.generation)
                    if target.finalized:
                        context.abort(grpc.StatusCode.FAILED_PRECONDITION, "The object has been finalized")
                    yield self._answer(resource=_resource(bucket, name, target))
                assert target is not None
                if request.HasField("checksummed_data"):
                    self._store(target, request, context)
                if request.flush:
                    target.persisted = len(target.data)
                if request.finish_write:
                    self._server.fault("before finish")
                    target.persisted, target.finalized = len(target.data), True
                    self._server.fault("after finish")
                    yield self._answer(resource=_resource(bucket, name, target))
                    return
                if request.state_lookup:
                    yield self._answer(persisted_size=target.persisted)
            if target is not None:
                yield self._answer(persisted_size=target.persisted)
        except Broken as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error) or "broken")
        except Refused:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "refused")
        finally:
            if target is not None:
                del target.data[target.persisted :]

    def _answer(self, **fields: Any) -> Any:
        handle = storage.BidiWriteHandle(handle=b"write")
        return storage.BidiWriteObjectResponse.pb(storage.BidiWriteObjectResponse(write_handle=handle, **fields))

    def _store(self, target: _Object, request: Any, context: Any) -> None:
        data = request.checksummed_data.content
        self._server.written.append(len(data))
        if google_crc32c.value(data) != request.checksummed_data.crc32c:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "The checksum is wrong")
        if request.write_offset != len(target.data):
            context.abort(grpc.StatusCode.OUT_OF_RANGE, f"{request.write_offset} is not {len(target.data)}")
        try:
            self._server.fault("before data")
        except Damaged:
            data = bytes([data[0] ^ 1]) + data[1:]
        except Lost:
            data = b""
            del target.data[: len(target.data) // 2]
            target.persisted = len(target.data)
            raise Broken from None
        target.data += data
        self._server.fault("after data")

    def read(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        """The step is "range"."""
        found = None
        try:
            for request in requests:
                answer = storage.BidiReadObjectResponse.pb()()
                if request.HasField("read_object_spec"):
                    spec = request.read_object_spec
                    bucket, name, found = self._find(spec.bucket, spec.object_, context, spec.generation)
                    answer.metadata.CopyFrom(storage.Object.pb(_resource(bucket, name, found)))
                    answer.read_handle.handle = b"read"
                    yield answer
                assert found is not None
                for asked in request.read_ranges:
                    self._server.asked.append(asked.read_length)
                    yield from self._ranges(found, asked)
        except Broken as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error) or "broken")

    def _ranges(self, found: _Object, asked: Any) -> Iterator[Any]:
        end = min(found.persisted, asked.read_offset + (asked.read_length or found.persisted))
        at = asked.read_offset
        while True:
            stop = min(end, at + _ANSWER)
            answer = storage.BidiReadObjectResponse.pb()()
            part = answer.object_data_ranges.add()
            data = bytes(found.data[at:stop])
            part.checksummed_data.crc32c = google_crc32c.value(data)
            try:
                self._server.fault("before range")
            except Damaged:
                data = bytes([data[0] ^ 1]) + data[1:]
            part.checksummed_data.content = data
            part.read_range.read_id = asked.read_id
            part.read_range.read_offset, part.read_range.read_length = at, stop - at
            part.range_end = stop >= end
            yield answer
            at = stop
            if at >= end:
                return

    def get_object(self, request: Any, context: Any) -> Any:
        return storage.Object.pb(_resource(*self._find(request.bucket, request.object_, context, request.generation)))

    def layout(self, request: Any, context: Any) -> Any:
        if request.name.split("/")[3] not in self._server.buckets:
            context.abort(grpc.StatusCode.NOT_FOUND, "The specified bucket does not exist.")
        layout = control.StorageLayout(name=request.name, location="us-central1-a", location_type="zone")
        layout.hierarchical_namespace.enabled = True
        return control.StorageLayout.pb(layout)

    def _folder(self, name: str, context: Any) -> tuple[str, str]:
        _, _, _, bucket, _, path = name.split("/", 5)
        if (bucket, path.rstrip("/")) not in self._server.folders:
            context.abort(grpc.StatusCode.NOT_FOUND, "The folder does not exist.")
        return bucket, path.rstrip("/")

    def get_folder(self, request: Any, context: Any) -> Any:
        self._folder(request.name, context)
        return control.Folder.pb(control.Folder(name=request.name))

    def delete_folder(self, request: Any, context: Any) -> Any:
        bucket, path = self._folder(request.name, context)
        with self._server.lock:
            inside = [*self._server.objects, *self._server.folders]
            if any(other == bucket and name.startswith(f"{path}/") for other, name in inside):
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, "The folder is not empty.")
            self._server.folders.remove((bucket, path))
        return empty_pb2.Empty()

    def list_folders(self, request: Any, context: Any) -> Any:
        bucket = request.parent.rpartition("/")[2]
        found = sorted(name for other, name in self._server.folders if other == bucket)
        names = [f"{request.parent}/folders/{name}/" for name in found if f"{name}/".startswith(request.prefix)]
        answer = control.ListFoldersResponse(folders=[control.Folder(name=name) for name in names])
        return control.ListFoldersResponse.pb(answer)

    def handlers(self) -> list[Any]:
        def unary(method: Any, kind: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(method, kind.pb().FromString, _serialized)

        def streams(method: Any, kind: Any) -> Any:
            return grpc.stream_stream_rpc_method_handler(method, kind.pb().FromString, _serialized)

        data = {
            "BidiWriteObject": streams(self.write, storage.BidiWriteObjectRequest),
            "BidiReadObject": streams(self.read, storage.BidiReadObjectRequest),
            "GetObject": unary(self.get_object, storage.GetObjectRequest),
        }
        folders = {
            "GetStorageLayout": unary(self.layout, control.GetStorageLayoutRequest),
            "GetFolder": unary(self.get_folder, control.GetFolderRequest),
            "DeleteFolder": unary(self.delete_folder, control.DeleteFolderRequest),
            "ListFolders": unary(self.list_folders, control.ListFoldersRequest),
        }
        return [
            grpc.method_handlers_generic_handler("google.storage.v2.Storage", data),
            grpc.method_handlers_generic_handler("google.storage.control.v2.StorageControl", folders),
        ]


def _serialized(message: Any) -> bytes:
    return bytes(message.SerializeToString())


class _Handler(BaseHTTPRequestHandler):
    """The JSON API."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, server: ZonalServer, *arguments: Any) -> None:
        self._server = server
        super().__init__(*arguments)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        bucket, name, query = self._target()
        if bucket not in self._server.buckets:
            self._missing("The specified bucket does not exist.")
        elif name is None:
            self._send(200, self._listing(bucket, query) if query is not None else {"name": bucket})
        elif (found := self._server.objects.get((bucket, name))) is None:
            self._missing(f"No such object: {bucket}/{name}")
        else:
            self._send(200, _item(bucket, name, found))

    def do_DELETE(self) -> None:
        bucket, name, _ = self._target()
        with self._server.lock:
            if self._server.objects.pop((bucket, str(name)), None) is None:
                return self._missing(f"No such object: {bucket}/{name}")
        self._send(204, None)

    def do_POST(self) -> None:
        """Renames. The step is "move"."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        bucket, names, _ = self._target()
        name, found_move, target = str(names).partition("/moveTo/o/")
        if not found_move:  # an upload: gcsfs takes a bucket that is missing for one of the usual kind
            assert bucket not in self._server.buckets, self.path
            return self._missing("The specified bucket does not exist.")
        try:
            self._server.fault("before move")
            with self._server.lock:
                moved = self._server.objects.pop((bucket, name), None)
                if moved is None:
                    return self._missing(f"No such object: {bucket}/{name}")
                self._server.create(bucket, target)
                self._server.objects[bucket, target].__dict__.update(
                    data=moved.data, persisted=moved.persisted, finalized=moved.finalized
                )
                answer = _item(bucket, target, self._server.objects[bucket, target])
            self._server.fault("after move")
        except Broken:
            return self._send(503, {"error": {"code": 503, "message": "broken"}})
        except Refused:
            return self._send(403, {"error": {"code": 403, "message": "renaming refused"}})
        self._send(200, answer)

    def _target(self) -> tuple[str, str | None, dict[str, list[str]] | None]:
        """The bucket, the object's name if it is about one, and the query if it is about all."""
        parts = urlsplit(self.path)
        bucket, found, name = parts.path.partition("/b/")[2].partition("/o")
        if not found or not name.strip("/"):
            return unquote(bucket), None, parse_qs(parts.query) if found else None
        return unquote(bucket), "/moveTo/o/".join(map(unquote, name[1:].split("/moveTo/o/"))), None

    def _listing(self, bucket: str, query: dict[str, list[str]]) -> dict[str, Any]:
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        items, prefixes = [], set()
        with self._server.lock:
            names = {name: found for (other, name), found in self._server.objects.items() if other == bucket}
            folders = [f"{name}/" for other, name in self._server.folders if other == bucket]
        for name in [*names, *(folders if "includeFoldersAsPrefixes" in query else [])]:
            rest = name.removeprefix(prefix)
            if not name.startswith(prefix) or not rest:
                continue
            if delimiter and delimiter in rest:
                prefixes.add(prefix + rest[: rest.index(delimiter) + 1])
            else:
                items.append(_item(bucket, name, names[name]))
        return {"items": sorted(items, key=lambda item: str(item["name"])), "prefixes": sorted(prefixes)}

    def _missing(self, message: str) -> None:
        self._send(404, {"error": {"code": 404, "message": message}})

    def _send(self, status: int, answer: Any) -> None:
        body = b"" if answer is None else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _item(bucket: str, name: str, found: _Object) -> dict[str, Any]:
    item = {"kind": "storage#object", "bucket": bucket, "name": name, "size": str(found.persisted)}
    item |= {"generation": str(found.generation), "metageneration": "1", "storageClass": "RAPID"}
    item |= {"updated": "2026-01-01T00:00:00Z", "timeCreated": "2026-01-01T00:00:00Z"}
    if found.finalized:
        checksum = google_crc32c.value(bytes(found.data)).to_bytes(4, "big")
        item |= {"timeFinalized": "2026-01-01T00:00:00Z", "crc32c": base64.b64encode(checksum).decode()}
    return item


@contextmanager
def zonal_server() -> Iterator[ZonalServer]:
    """Starts the server on free ports of the loopback interface."""
    server = ZonalServer()
    with ExitStack() as running:
        threads = running.enter_context(ThreadPoolExecutor(64))
        calls = grpc.server(threads, options=[("grpc.max_receive_message_length", -1)])
        calls.add_generic_rpc_handlers(_Service(server).handlers())
        server.grpc_address = f"127.0.0.1:{calls.add_insecure_port('127.0.0.1:0')}"
        calls.start()
        running.callback(lambda: calls.stop(0).wait())
        web = running.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, server)))
        server.endpoint = f"http://127.0.0.1:{web.server_port}"
        thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        running.callback(thread.join)
        running.callback(web.shutdown)
        # a client that was made for another server would go on asking that
        ExtendedGcsFileSystem.clear_instance_cache()
        running.callback(ExtendedGcsFileSystem.clear_instance_cache)
        yield server


def lead_gcsfs_to(server: ZonalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes gcsfs, as it is outside the tests, speak gRPC to the server: it would insist on TLS for some of it."""

    async def data(fs: Any) -> AsyncGrpcClient:
        if fs._grpc_client is None:
            options = ClientOptions(api_endpoint=server.grpc_address)
            fs._grpc_client = AsyncGrpcClient(credentials=AnonymousCredentials(), client_options=options)
        return fs._grpc_client  # type: ignore[no-any-return]

    async def folders(fs: Any) -> Any:
        if fs._storage_control_client is None:
            kind = control.StorageControlAsyncClient.get_transport_class("grpc_asyncio")
            transport = kind(channel=grpc.aio.insecure_channel(server.grpc_address))  # type: ignore[call-arg]
            fs._storage_control_client = control.StorageControlAsyncClient(transport=transport)
        return fs._storage_control_client

    monkeypatch.setattr(ExtendedGcsFileSystem, "_get_grpc_client", data)
    monkeypatch.setattr(ExtendedGcsFileSystem, "_get_control_plane_client", folders)
    monkeypatch.setitem(_registry, "gs", ExtendedGcsFileSystem)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint)
