"""The benchmarks' S3 server as its clients see it."""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

SERVER = Path(__file__).parents[2] / "benchmarks" / "object_server.py"
KIB = 1 << 10


@pytest.fixture
def serve() -> Iterator[Callable[..., int]]:
    """Starts a server with options of its command line, and gives its port."""
    running: list[Any] = []

    def start(*options: str) -> int:
        command = [sys.executable, str(SERVER), *options]
        running.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return int(running[-1].stdout.readline())

    yield start
    for process in running:
        process.communicate(timeout=10)  # closes its standard input
        assert process.returncode == 0


def client(port: int, **config: Any) -> Any:
    return boto3.client(
        "s3", endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1", aws_access_key_id="key",
        aws_secret_access_key="secret", config=Config(**config),
    )  # fmt: skip


def log_of(port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/log") as answer:
        return json.load(answer)


def test_keeps_objects_and_answers_ranges_heads_lists_copies_and_removals(serve: Callable[..., int]) -> None:
    s3 = client(serve())
    body = bytes(range(256)) * KIB
    tag = s3.put_object(Bucket="b", Key="x/1 +%.ckpt", Body=body)["ETag"]
    s3.put_object(Bucket="b", Key="y", Body=b"")
    s3.copy_object(Bucket="b", Key="x/2", CopySource={"Bucket": "b", "Key": "x/1 +%.ckpt"})
    assert s3.get_object(Bucket="b", Key="x/2")["Body"].read() == body
    part = s3.get_object(Bucket="b", Key="x/1 +%.ckpt", Range="bytes=1000-1999", IfMatch=tag)
    assert (part["Body"].read(), part["ContentRange"]) == (body[1000:2000], f"bytes 1000-1999/{len(body)}")
    assert s3.get_object(Bucket="b", Key="x/2", Range="bytes=-3")["Body"].read() == body[-3:]
    assert s3.head_object(Bucket="b", Key="y")["ContentLength"] == 0
    listing = s3.list_objects_v2(Bucket="b", Delimiter="/")
    assert [entry["Key"] for entry in listing["Contents"]] == ["y"]
    assert [entry["Prefix"] for entry in listing["CommonPrefixes"]] == ["x/"]
    listing = s3.list_objects_v2(Bucket="b", Prefix="x/")
    assert [entry["Key"] for entry in listing["Contents"]] == ["x/1 +%.ckpt", "x/2"]
    s3.delete_objects(Bucket="b", Delete={"Objects": [{"Key": "x/1 +%.ckpt"}, {"Key": "x/2"}]})
    s3.delete_object(Bucket="b", Key="y")
    assert "Contents" not in s3.list_objects_v2(Bucket="b")
    with pytest.raises(ClientError, match="404"):
        s3.head_object(Bucket="b", Key="y")


def test_refuses_what_does_not_fit_the_object(serve: Callable[..., int]) -> None:
    s3 = client(serve())
    s3.put_object(Bucket="b", Key="x", Body=b"123")
    for options, code in (({"Range": "bytes=3-"}, "InvalidRange"), ({"IfMatch": '"other"'}, "PreconditionFailed")):
        with pytest.raises(ClientError, match=code):
            s3.get_object(Bucket="b", Key="x", **options)


def test_joins_parts_in_order_and_forgets_an_aborted_upload(serve: Callable[..., int]) -> None:
    s3 = client(serve())
    upload = {"Bucket": "b", "Key": "x", "UploadId": s3.create_multipart_upload(Bucket="b", Key="x")["UploadId"]}
    parts = []
    for number in (2, 1):
        tag = s3.upload_part(**upload, PartNumber=number, Body=bytes([number]) * 70 * KIB)["ETag"]
        parts.insert(0, {"PartNumber": number, "ETag": tag})
    with pytest.raises(ClientError, match="404"):
        s3.head_object(Bucket="b", Key="x")
    s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
    assert s3.get_object(Bucket="b", Key="x")["Body"].read() == b"\1" * 70 * KIB + b"\2" * 70 * KIB
    between = s3.get_object(Bucket="b", Key="x", Range=f"bytes={70 * KIB - 1}-{70 * KIB}")
    assert between["Body"].read() == b"\1\2"
    upload["UploadId"] = s3.create_multipart_upload(Bucket="b", Key="x")["UploadId"]
    s3.abort_multipart_upload(**upload)
    with pytest.raises(ClientError, match="NoSuchUpload"):
        s3.upload_part(**upload, PartNumber=1, Body=b"")


@pytest.mark.parametrize("header", [("Transfer-Encoding", "chunked"), ("Content-Encoding", "aws-chunked")])
def test_refuses_codings_of_a_body_rather_than_keep_them_in_the_object(
    serve: Callable[..., int], header: tuple[str, str]
) -> None:
    connection = HTTPConnection("127.0.0.1", serve())
    connection.putrequest("PUT", "/b/x")
    connection.putheader(*header)
    connection.endheaders()
    assert connection.getresponse().status == 501
    connection.close()


def test_the_sink_keeps_sizes_only(serve: Callable[..., int]) -> None:
    port = serve()
    s3 = client(port)
    s3.put_object(Bucket="sink", Key="x", Body=b"123")
    assert s3.head_object(Bucket="sink", Key="x")["ContentLength"] == 3
    with pytest.raises(ClientError, match="BodyWasDiscarded"):
        s3.get_object(Bucket="sink", Key="x")
    requests = log_of(port)["requests"]
    assert [(request["method"], request["bytes"]) for request in requests] == [("PUT", 3), ("HEAD", 0), ("GET", 0)]
    assert "Botocore" in requests[0]["client"]
    assert requests[0]["payload"] == "SHA-256"


def test_a_link_takes_its_time(serve: Callable[..., int]) -> None:
    port = serve("--latency-ms", "30", "--megabytes-per-s", "10")
    s3 = client(port, s3={"payload_signing_enabled": False})
    started = time.monotonic()
    s3.put_object(Bucket="b", Key="x", Body=bytes(10**6))
    s3.get_object(Bucket="b", Key="x")["Body"].read()
    # three latencies, for the first request of a connection has two, and twice a megabyte but for the first steps
    assert time.monotonic() - started >= 0.09 + 0.16
    assert log_of(port)["link_s"] >= 0.09 + 0.16
