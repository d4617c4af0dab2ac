import logging
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lightning.fabric.storage.archives.save import save_file
from lightning.fabric.storage.paths import filesystem, remove
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.paths.place import LocalPlace, StorePlace
from lightning.fabric.storage.paths.redact import redact
from tests.servers import Bucket
from tests.storage import tree  # noqa: F401  # registers the protocol


@pytest.fixture(autouse=True)
def _empty_memory() -> None:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("run/last.ckpt", LocalPlace("run/last.ckpt")),
        (Path("run/last.ckpt"), LocalPlace("run/last.ckpt")),
        ("file:///tmp/x.ckpt", LocalPlace("/tmp/x.ckpt")),
        ("s3://bucket/a b[1]*.ckpt", StorePlace("s3://bucket/a b[1]*.ckpt")),
        ("simplecache::s3://bucket/x", StorePlace("simplecache::s3://bucket/x")),
        (Path("odd:name/x"), LocalPlace("odd:name/x")),
        ("~/x.ckpt", LocalPlace(Path.home() / "x.ckpt")),
        ("file:/tmp/x.ckpt", LocalPlace("/tmp/x.ckpt")),
        (Path("file:///tmp/x.ckpt"), LocalPlace("/tmp/x.ckpt")),
        (StorePlace("s3://bucket/x"), StorePlace("s3://bucket/x")),
    ],
)
def test_a_path_is_a_local_place_and_a_url_is_one_in_a_store(given: Any, expected: object) -> None:
    assert locate(given) == expected


@pytest.mark.parametrize("options", [{}, {"client_kwargs": {"auth": None}}])
def test_websites_are_reached_through_the_proxy_of_the_environment(options: dict[str, Any]) -> None:
    fs, _ = locate("https://host/x.ckpt", options).resolve()
    assert fs.client_kwargs["trust_env"] is True
    assert fs.client_kwargs.keys() == {"trust_env", *options.get("client_kwargs", {})}


@pytest.mark.parametrize("protocol", ["s3", "gs", "abfs", "hdfs", "memory"])
def test_a_path_made_from_a_url_is_taken_for_the_url(protocol: str) -> None:
    assert locate(Path(f"{protocol}://bucket/run/x.ckpt")).raw == f"{protocol}://bucket/run/x.ckpt"


@pytest.mark.parametrize(
    ("folder", "inside"),
    [
        ("s3://bucket/run/", "s3://bucket/run/meta.pt"),
        ("s3://bucket", "s3://bucket/meta.pt"),
        ("memory://", "memory://meta.pt"),
        ("run/", "run/meta.pt"),
        (".", "meta.pt"),
        ("/", "/meta.pt"),
    ],
)
def test_names_in_a_folder_keep_urls_whole_and_options_with_them(folder: str, inside: str) -> None:
    place = locate(folder, {"key": "k"}) / "meta.pt"
    assert (place.raw, place.name) == (inside, "meta.pt")
    assert place.options == ({} if place.is_local else {"key": "k"})
    assert place.parent.is_same(locate(folder, {"key": "k"})) or not place.parent.is_local
    assert place.parent / "meta.pt" == place
    assert place.parent.options == place.options == place.beside(".new").options
    assert place.beside(".new").raw == f"{inside}.new"


def test_the_text_of_a_place_can_be_shown_whatever_shows_it(caplog: pytest.LogCaptureFixture) -> None:
    place = locate("unknown://me:hunter2@host/x?sig=hunter2", {"secret": "hunter2"})
    logging.getLogger("lightning").warning("%s %r", place, place)
    shown = [str(place), f"{place}", f"{place!r}", repr([place]), str({place: place}), caplog.text]
    assert all("unknown://me:***@host/x?sig=***" in text and "hunter2" not in text for text in shown)
    assert place.raw == "unknown://me:hunter2@host/x?sig=hunter2"
    with pytest.raises(TypeError):
        os.fspath(place)  # type: ignore[arg-type]


def test_places_are_equal_by_their_whole_text_and_kind() -> None:
    assert locate("s3://b/x") == locate("s3://b/x", {"key": "k"})
    assert len({locate("s3://b/x"), locate("s3://b/x"), locate("s3://b/y"), locate("x"), locate(Path("./x"))}) == 3
    assert locate("ftp://me:one@host/x") != locate("ftp://me:two@host/x")  # though they are shown alike
    assert LocalPlace("x") != StorePlace("x")
    assert locate("x") != "x"


def test_a_place_is_sent_to_another_process_with_its_options_and_without_its_client(bucket: Bucket) -> None:
    place = locate(f"{bucket.url}/x", {"use_listings_cache": False})
    fs, _ = place.resolve()
    assert place.resolve()[0] is fs
    sent = pickle.loads(pickle.dumps(place))
    assert (sent, sent.options) == (place, {"use_listings_cache": False})
    assert "_resolved" not in vars(sent)
    here = locate("run/x")
    assert pickle.loads(pickle.dumps(here)) == here


def test_each_thread_and_each_fork_has_a_client_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    place = locate("tree:///run/x")  # of which no connection could be shared
    own = place.resolve()[0]
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(place.resolve).result()[0] is not own
    again = place.resolve()[0]
    assert again is own
    monkeypatch.setattr(os, "getpid", lambda: 0)
    assert place.resolve()[0] is not own


def test_no_client_is_imported_until_a_place_is_asked() -> None:
    script = """
import pickle, sys
from lightning.fabric.storage.paths.location import locate
place = locate("s3://bucket/x", {"key": "k"})
print(place / "y", place == pickle.loads(pickle.dumps(place)), place.is_same(locate("gs://bucket/x")))
assert not {"s3fs", "botocore", "gcsfs"} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "s3://bucket/x/y True False\n"


@pytest.mark.parametrize(
    ("secret", "shown"),
    [
        ("sftp://me:hunter2@host/x", "sftp://me:***@host/x"),
        ("https://host/x?sv=1&sig=hunter2", "https://host/x?sv=1&sig=***"),
        ("https://host/x?X-Amz-Credential=hunter2&X-Amz-Signature=hunter2", None),
        ("denied for https://host/x?token=hunter2 (403)", "denied for https://host/x?token=*** (403)"),
        ("https://host/x?X-Goog-Signature=hunter2&a=b", "https://host/x?X-Goog-Signature=***&a=b"),
        ("https://host/x?access_token=hunter2&api_key=hunter2", "https://host/x?access_token=***&api_key=***"),
        ("https://host/x?AWSAccessKeyId=hunter2&X-Amz-Security-Token=hunter2&key=hunter2", None),
        ("https://hunter2@host/x", "https://***@host/x"),
        ("ftp://me:hunter2@hunter2@host/x", "ftp://me:***@host/x"),
    ],
)
def test_no_credential_of_a_url_is_displayed(secret: str, shown: str) -> None:
    assert "hunter2" not in redact(secret)
    assert shown is None or redact(secret) == shown


@pytest.mark.parametrize(
    "request_of_a_client",
    [
        "http://host/b?list-type=2&prefix=run/&max-keys=1&continuation-token=run/x&encoding-type=url",
        "https://host/b/o?maxResults=1&pageToken=x",
        "https://host/b?versions&key-marker=x&X-Amz-Date=20260101T000000Z",
    ],
)
def test_what_is_no_credential_is_displayed(request_of_a_client: str) -> None:
    assert redact(request_of_a_client) == request_of_a_client


@pytest.mark.parametrize(
    ("protocol", "options", "expected"),
    [
        ("s3", {}, True),
        ("gs", {"token": "anon"}, True),
        ("abfs", {"account_name": "x", "account_key": "eA=="}, True),
        ("memory", {}, True),
        ("webhdfs", {"host": "localhost"}, False),
        ("file", {}, False),
        ("dir", {"path": "/", "fs": fsspec.filesystem("memory")}, True),
        ("dir", {"path": "/", "fs": fsspec.filesystem("file")}, False),
    ],
)
def test_object_stores_are_told_by_their_own_pipe_file(protocol: str, options: dict, expected: bool) -> None:
    fs = fsspec.filesystem(protocol, skip_instance_cache=True, **options)
    assert filesystem.is_object_store(fs) is expected


@pytest.mark.parametrize("root", ["memory://folder", "s3", "local"])
def test_removal_is_literal_and_leaves_neighbours_alone(root: str, bucket: Bucket, tmp_path: Path) -> None:
    root = {"s3": f"{bucket.url}/run", "local": str(tmp_path)}.get(root, root)
    fs, path = fsspec.url_to_fs(root)
    names = [
        "a[1]*?.ckpt",
        "a1.ckpt",
        "a[1]*?.ckpt2",
        "shards/.metadata",
        "shards/meta.pt",
        "shards/sub/x",
        "shards2/x",
    ]
    for name in names:
        fs.makedirs(f"{path}/{name}".rpartition("/")[0], exist_ok=True)
        fs.pipe_file(f"{path}/{name}", b"1")
    remove.remove(locate(root) / "a[1]*?.ckpt")
    remove.remove(locate(root) / "shards")
    remove.remove(locate(root) / "was-never-there")
    fs.invalidate_cache()
    assert {name[len(path) :].lstrip("/") for name in fs.find(path)} == {"a1.ckpt", "a[1]*?.ckpt2", "shards2/x"}


@pytest.mark.parametrize("place", ["", ".", "..", "/", "memory://", "s3://bucket", "s3://bucket/", "tree:///"])
def test_more_than_a_checkpoint_is_not_removed(
    place: str, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "precious").touch()
    bucket.put("precious", b"1")
    with pytest.raises(ValueError, match="Refusing to remove"):
        remove.remove(locate(place.replace("s3://bucket", bucket.url)))
    assert (tmp_path / "precious").exists()
    assert bucket.names() == ["precious"]


def test_a_large_folder_is_removed_with_its_marks_first(bucket: Bucket) -> None:
    for name in ["meta.pt", ".metadata", *(f"{i}.distcp" for i in range(20))]:
        bucket.put(f"x.ckpt/{name}", b"1")
    remove.remove(locate(f"{bucket.url}/x.ckpt"))
    removed = [path.rpartition("/")[2] for method, path in bucket.requests if method == "DELETE"]
    assert set(removed[:2]) == {"meta.pt", ".metadata"}
    assert len(removed) == 22
    assert bucket.names() == []


def test_on_an_object_store_a_file_and_a_folder_of_one_name_are_told_apart(bucket: Bucket) -> None:
    place = locate(f"{bucket.url}/last.ckpt")
    bucket.put("last.ckpt/meta.pt", b"1")
    assert place.kind() == "directory"
    assert not place.is_file()
    assert not place.is_folder()  # nothing keeps a file from being written there
    bucket.put("last.ckpt", b"full")
    assert place.is_file()
    remove.remove_folder(place)
    assert bucket.names() == ["last.ckpt"]


def test_what_another_process_wrote_is_seen_at_once(bucket: Bucket) -> None:
    place = locate(f"{bucket.url}/run/x.ckpt")
    bucket.put("run/other", b"1")
    fsspec.url_to_fs(place.raw)[0].ls(f"{bucket.name}/run")  # fills the listing cache
    assert not place.is_file()
    bucket.put("run/x.ckpt", b"1")
    assert place.is_file()
    assert locate(f"{bucket.url}/run").sizes_of_files() == {"other": 1, "x.ckpt": 1}


def test_a_denied_question_is_an_error_and_not_a_no(bucket: Bucket) -> None:
    with bucket.refusing(lambda method, path: 403), pytest.raises(PermissionError):
        locate(f"{bucket.url}/x.ckpt").is_file()


def test_what_a_client_repeats_of_a_url_with_a_password_is_hidden() -> None:
    told = redact('Invalid bucket name "AKIA:secret@bucket"', "s3://AKIA:secret@bucket/x.ckpt")
    assert told == 'Invalid bucket name "***@bucket"'
    assert redact("no such key", "s3://bucket/x.ckpt") == "no such key"


def test_a_password_that_the_client_repeats_does_not_reach_the_error_of_a_save() -> None:
    url = "s3://AKIA:verysecret@bucket/x.ckpt"  # which is no way to give it to S3
    with pytest.raises(OSError, match=r"Could not write s3://AKIA:\*\*\*@bucket") as raised:
        save_file({}, url, {"key": "a", "secret": "b"})
    assert "verysecret" not in str(raised.value)
