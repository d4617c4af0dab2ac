"""Options of the installed clients: none is passed over unnoticed, and none is missing in the documentation."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from adlfs import AzureBlobFileSystem
from gcsfs.extended_gcsfs import ExtendedGcsFileSystem
from google.oauth2.credentials import Credentials
from s3fs import S3FileSystem

from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.paths.place import StorePlace
from lightning.fabric.storage.transport import multipart
from lightning.fabric.storage.transport import open as transport
from lightning.fabric.storage.transport.backends.obstore_config import azure, common, gcs, s3
from tests.storage.transport.obstore_config.recorder import Answer, Recorder, Request

MIB = 2**20
CLIENTS = {"s3fs": (S3FileSystem, s3), "gcsfs": (ExtendedGcsFileSystem, gcs), "adlfs": (AzureBlobFileSystem, azure)}
#: Options with a value that files need not go through the client for.
SOME_VALUES = {"consistency", "location_mode"}

clients = pytest.mark.parametrize("client", CLIENTS)


def documented(client: str) -> list[set[str]]:
    """The options in the columns of the client's row: used, through the client, no difference."""
    page = (Path(__file__).parents[4] / "docs" / "stores.md").read_text()
    (row,) = re.findall(rf"^\| {client} \|(.*)\|$", page, re.MULTILINE)
    return [set(re.findall("`(.*?)`", column)) for column in row.split("|")]


@clients
def test_each_option_of_the_installed_client_is_documented(client: str) -> None:
    kind, _ = CLIENTS[client]
    constructors = [vars(base)["__init__"] for base in kind.__mro__[:-2] if "__init__" in vars(base)]
    options = {
        name
        for one in constructors
        for name, parameter in inspect.signature(one).parameters.items()
        if parameter.kind is not parameter.VAR_POSITIONAL and parameter.kind is not parameter.VAR_KEYWORD
    } - {"self"}
    used, through_client, no_difference = documented(client)
    assert sorted([*used, *through_client, *no_difference]) == sorted(options)


@clients
def test_what_is_documented_is_what_is_done(client: str) -> None:
    _, translation = CLIENTS[client]
    used, through_client, no_difference = documented(client)
    assert through_client - SOME_VALUES == translation._OPTIONS_IF_UNSET
    known = translation._OPTIONS | common._OPTIONS_OF_FSSPEC
    assert used | no_difference | (through_client & SOME_VALUES) <= known


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize(
    ("client", "option"), [("s3fs", "default_block_size"), ("gcsfs", "block_size"), ("adlfs", "blocksize")]
)
def test_parts_have_the_size_that_an_option_says(
    tls_records: Recorder, monkeypatch: pytest.MonkeyPatch, client: str, option: str
) -> None:
    host = tls_records.url.partition("://")[2]
    reached: dict[str, dict[str, Any]] = {
        "s3fs": {"endpoint_url": tls_records.url, "key": "a", "secret": "b", "client_kwargs": {"verify": False}},
        "gcsfs": {"endpoint_url": tls_records.url, "token": Credentials("token")},
        "adlfs": {"account_name": "a", "account_key": "YQ==", "account_host": f"{host}/a"},
    }
    fs = CLIENTS[client][0](**reached[client], **{option: 6 * MIB}, skip_instance_cache=True)
    monkeypatch.setattr(StorePlace, "resolve", lambda place: (fs, "bucket/x"))
    with transport.open_writer(locate("s3://bucket/x")) as file:
        file.write(bytes(13 * MIB))
    (parts,) = [parts for parts in tls_records.parts.values() if parts]
    assert sorted(map(len, parts.values())) == [MIB, 6 * MIB, 6 * MIB]


def test_parts_are_named_with_their_checksums_where_an_option_asks_for_some(
    records: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(request: Request) -> Answer | None:
        return (200, {"x-amz-checksum-sha256": f"sum{number}"}) if (number := request.query.get("partNumber")) else None

    records.rule = answer
    records.parts["bucket/x"] = {"1": b"", "2": b""}
    keys = {"endpoint_url": records.url, "key": "a", "secret": "b", "skip_instance_cache": True}
    fs = S3FileSystem(**keys, s3_additional_kwargs={"ChecksumAlgorithm": "SHA256"})
    monkeypatch.setattr(StorePlace, "resolve", lambda place: (fs, "bucket/x"))
    monkeypatch.setattr(multipart, "SMALLEST_PART", 5 * MIB)
    with transport.open_writer(locate("s3://bucket/x")) as file:
        file.write(bytes(6 * MIB))
    (completion,) = [
        request for request in records.requests if request.method == "POST" and "uploadId" in request.query
    ]
    assert re.findall(b"<ChecksumSHA256>(.*?)<", completion.body) == [b"sum1", b"sum2"]
