"""S3: moto, with a proxy before it."""

import logging
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import boto3
import pytest
from moto.s3.exceptions import InvalidPart
from moto.s3.models import FakeMultipart
from moto.server import ThreadedMotoServer

from tests.servers.credentials import SECRET
from tests.servers.proxy import Filter, Rule, proxy_before


@dataclass
class Server:
    """A running S3 server."""

    endpoint: str
    client: Any
    proxy: Any = None
    key: str = "test"

    @property
    def environment(self) -> dict[str, str]:
        """What s3fs and boto read, and nothing of the user's own configuration."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.key,
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

    def names(self, prefix: str = "") -> list[str]:
        listed = self.server.client.list_objects_v2(Bucket=self.name, Prefix=prefix)
        return sorted(entry["Key"] for entry in listed.get("Contents", []))

    def empty(self) -> None:
        for name in self.names():
            self.remove(name)

    def get(self, key: str) -> bytes:
        return self.server.client.get_object(Bucket=self.name, Key=key)["Body"].read()

    def put(self, key: str, body: bytes) -> None:
        self.server.client.put_object(Bucket=self.name, Key=key, Body=body)

    def unfinished_uploads(self) -> list[str]:
        uploads = self.server.client.list_multipart_uploads(Bucket=self.name).get("Uploads", [])
        return [upload["Key"] for upload in uploads]

    def remove(self, key: str) -> None:
        self.server.client.delete_object(Bucket=self.name, Key=key)

    @property
    def requests(self) -> list[tuple[str, str]]:
        """Method and path of all that was asked of this bucket through the endpoint, in order."""
        return [(method, path) for method, path in self.server.proxy.requests if path.startswith(f"/{self.name}")]

    def refusing(self, rule: Rule) -> AbstractContextManager[None]:
        """Lets ``rule`` decide what becomes of the requests that come through the endpoint."""
        return self.server.proxy.following(rule)

    def filtering(self, names: Filter) -> AbstractContextManager[None]:
        """Lets ``names`` decide what becomes of the headers of requests that come through the endpoint."""
        return self.server.proxy.filtering(names)

    @property
    def headers(self) -> list[dict[str, str]]:
        """Those of :attr:`requests`."""
        asked = zip(self.server.proxy.requests, self.server.proxy.headers, strict=True)
        return [headers for (_, path), headers in asked if path.startswith(f"/{self.name}")]


@contextmanager
def s3_server() -> Iterator[Server]:
    """Starts moto and the proxy on free ports of the loopback interface."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    try:
        with proxy_before((host, port)) as proxy:
            yield Server(f"http://127.0.0.1:{proxy.server_port}", s3_client(f"http://{host}:{port}"), proxy)
    finally:
        moto.stop()


def demand_equal_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has moto complete an upload only if all its parts but the last are of one size, as Cloudflare R2 does."""
    complete = FakeMultipart.complete

    def check(upload: FakeMultipart, body: Any) -> Any:
        named = list(body)
        if len({upload.parts[number].contentsize for number, *_ in named[:-1]}) > 1:
            raise InvalidPart
        return complete(upload, iter(named))

    monkeypatch.setattr(FakeMultipart, "complete", check)


def s3_client(endpoint: str, key: str = "test") -> Any:
    """A client that is none of those under test."""
    return boto3.client(
        "s3", endpoint_url=endpoint, region_name="us-east-1",
        aws_access_key_id=key, aws_secret_access_key=SECRET,
    )  # fmt: skip
