"""What stores and proxies refuse, drop or do not know of what is sent beside plain requests, by obstore and by s3fs."""

import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning.fabric.storage.archives.load import load_file
from lightning.fabric.storage.archives.save import save_file
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.tools.copy import duplicate
from lightning.fabric.storage.transport import multipart, server_side_copy
from lightning.fabric.storage.transport.backends import fsspec_reader, obstore_config
from lightning.fabric.storage.transport.open import open_source
from tests.servers import Bucket, Fault, Rule
from tests.servers.proxy import Filter, drop, refuse
from tests.storage.states import serialized

_MIB = 2**20
SMALL = {"w": torch.arange(1000)}
LARGE = {"w": torch.arange(800_000)}


#: For what obstore cannot do, and the client takes over.
only_obstore = pytest.mark.parametrize("engine", ["obstore"], indirect=True)


@pytest.fixture(autouse=True, params=["obstore", "s3fs"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> str:
    if request.param == "s3fs":
        monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setattr(multipart, "SMALLEST_PART", 5 * _MIB)
    monkeypatch.setattr(server_side_copy, "_S3_PART", 5 * _MIB)
    monkeypatch.setattr(obstore_config, "_logged", set())
    caplog.set_level(logging.INFO, logger="lightning.fabric.storage")
    return str(request.param)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture, engine: str) -> Callable[[], list[str]]:
    """What has been logged about transfers through the client, and not for want of obstore."""
    return lambda: [
        line for line in caplog.messages if "go through fsspec" in line and "there is no obstore" not in line
    ]


def save_copy_and_load(bucket: Bucket, state: dict[str, Any]) -> None:
    save_file(state, f"{bucket.url}/run/x.ckpt")
    duplicate(f"{bucket.url}/run/x.ckpt", f"{bucket.url}/run/last.ckpt")
    for name in ("x", "last"):
        assert torch.equal(load_file(f"{bucket.url}/run/{name}.ckpt")["w"], state["w"])


def sends_metadata(headers: dict[str, str]) -> bool:
    return any(name.startswith("x-amz-meta-") for name in headers)


@pytest.mark.parametrize(
    "names",
    [drop("_"), refuse("^x-amz-meta-", 403), refuse("^x-amz-meta-", 400), refuse("^if-", 400), drop("^if-")],
    ids=["underscores dropped", "metadata forbidden", "metadata invalid", "conditions refused", "conditions dropped"],
)
def test_what_is_sent_beside_a_plain_request_is_not_needed(bucket: Bucket, names: Filter) -> None:
    with bucket.filtering(names):
        for state in (SMALL, LARGE):
            save_copy_and_load(bucket, state)
    assert bucket.unfinished_uploads() == []


def test_metadata_that_a_store_refuses_is_sent_once(bucket: Bucket) -> None:
    with bucket.filtering(refuse("^x-amz-meta-", 403)):
        for _ in range(2):
            save_copy_and_load(bucket, LARGE)
    assert sum(map(sends_metadata, bucket.headers)) == 1


def test_a_file_of_one_request_has_no_metadata(bucket: Bucket) -> None:
    save_file(SMALL, f"{bucket.url}/x")
    assert not any(map(sends_metadata, bucket.headers))
    save_file(LARGE, f"{bucket.url}/x")
    assert any(map(sends_metadata, bucket.headers))


def test_a_refusal_that_is_not_for_metadata_is_told_and_nothing_is_remembered(bucket: Bucket) -> None:
    with bucket.refusing(lambda method, path: 403 if method == "POST" else None), pytest.raises(PermissionError):
        save_file(LARGE, f"{bucket.url}/x")
    before = len(bucket.headers)
    save_file(LARGE, f"{bucket.url}/x")
    assert any(map(sends_metadata, bucket.headers[before:]))


def test_ranges_that_come_with_the_status_of_a_whole_are_read_through_the_client(
    bucket: Bucket, engine: str, told: Callable[[], list[str]]
) -> None:
    for state in (SMALL, LARGE):
        save_file(state, f"{bucket.url}/x")
        with bucket.refusing(lambda method, path: Fault.WHOLE if method == "GET" else None):
            assert torch.equal(load_file(f"{bucket.url}/x")["w"], state["w"])
    assert len(told()) == (engine == "obstore")


def test_a_whole_with_another_checksum_is_an_error(bucket: Bucket) -> None:
    fs, path = locate(f"{bucket.url}/x").resolve()
    bucket.put("x", b"0123456789")
    source = fsspec_reader.FsspecSource(fs, path)
    garbling = bucket.refusing(lambda method, path: Fault.GARBLED if method == "GET" else None)
    with garbling, pytest.raises(Exception, match="checksum"):
        source.read_into(0, memoryview(bytearray(10)))


def test_a_store_without_ranges_is_read_whole(bucket: Bucket) -> None:
    save_file(LARGE, f"{bucket.url}/x")
    with bucket.filtering(lambda headers: {name: headers[name] for name in headers if name != "range"}):
        assert torch.equal(load_file(f"{bucket.url}/x")["w"], LARGE["w"])


@only_obstore
@pytest.mark.parametrize("outcome", [400, 405, Fault.GARBLED])
def test_an_upload_that_a_store_does_not_begin_for_obstore_goes_through_the_client_from_its_first_byte_on(
    bucket: Bucket, told: Callable[[], list[str]], outcome: int | Fault
) -> None:
    def refuse_obstore(method: str, path: str) -> int | Fault | None:
        return outcome if path.endswith("?uploads=") else None  # the client sends no `=`

    with bucket.refusing(refuse_obstore):
        for _ in range(2):
            save_file(LARGE, f"{bucket.url}/x")
            assert torch.equal(load_file(f"{bucket.url}/x")["w"], LARGE["w"])
    assert len(told()) == 1
    assert bucket.name in told()[0]
    assert sum(path.endswith("?uploads=") for _, path in bucket.requests) == (2 if outcome == 400 else 1)


def first_of(outcome: int | Fault, method: str, path: str = "") -> Rule:
    """What becomes of the first request with such a path."""
    outcomes = iter([outcome])
    return lambda asked, of: next(outcomes, None) if asked == method and path in of else None


@only_obstore
@pytest.mark.parametrize("method", ["PUT", "HEAD"])
def test_a_request_of_obstores_that_a_store_does_not_know_is_made_by_the_client(
    bucket: Bucket, told: Callable[[], list[str]], method: str
) -> None:
    with bucket.refusing(first_of(405, method)):
        save_file(SMALL, f"{bucket.url}/x")
        assert torch.equal(load_file(f"{bucket.url}/x")["w"], SMALL["w"])
    assert len(told()) == 1


@only_obstore
def test_a_part_that_a_store_does_not_know_is_an_error_once(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = torch.arange(4 * 2**20)
    with (
        bucket.refusing(first_of(405, "PUT", "partNumber=4")),
        pytest.raises(OSError, match="The next save there goes"),
    ):
        save_file({"w": parts}, f"{bucket.url}/x")
    assert bucket.names() == []
    assert bucket.unfinished_uploads() == []
    save_file({"w": parts}, f"{bucket.url}/x")
    assert torch.equal(load_file(f"{bucket.url}/x")["w"], parts)


@only_obstore
def test_a_commit_with_an_answer_that_nobody_understands_is_looked_for(bucket: Bucket) -> None:
    with bucket.refusing(first_of(Fault.GARBLED, "POST", "uploadId=")):
        save_file(LARGE, f"{bucket.url}/x")
    assert torch.equal(load_file(f"{bucket.url}/x")["w"], LARGE["w"])


@only_obstore
def test_a_client_that_is_refused_as_well_says_why_and_nothing_is_remembered(
    bucket: Bucket, told: Callable[[], list[str]]
) -> None:
    with (
        bucket.refusing(lambda method, path: 405 if method == "POST" else None),
        pytest.raises(OSError, match="refused") as raised,
    ):
        save_file(LARGE, f"{bucket.url}/x")
    assert str(raised.value).endswith("What was there before, if anything, is unchanged.")  # no word about credentials
    assert told() == []


@only_obstore
def test_what_replaces_an_object_while_the_client_takes_over_is_an_error(bucket: Bucket) -> None:
    save_file(LARGE, f"{bucket.url}/x")
    other = {"w": LARGE["w"] + 1}

    def replace(method: str, path: str) -> Fault | None:
        if method != "GET":
            return None
        bucket.server.proxy.rule = lambda method, path: Fault.WHOLE if method == "GET" else None
        bucket.put("x", serialized(other))
        return Fault.WHOLE

    with bucket.refusing(replace), pytest.raises(OSError, match="it was replaced while it was read"):
        load_file(f"{bucket.url}/x")
    assert torch.equal(load_file(f"{bucket.url}/x")["w"], other["w"])


def test_a_range_beyond_a_shorter_version_says_that_it_was_replaced(bucket: Bucket) -> None:
    save_file(LARGE, f"{bucket.url}/x")
    source = open_source(locate(f"{bucket.url}/x"))
    bucket.put("x", b"short")
    with pytest.raises(OSError, match="it was replaced while it was read"):
        source.read_into(source.size - 10, memoryview(bytearray(10)))
