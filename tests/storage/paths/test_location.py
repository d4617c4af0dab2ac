from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lightning.fabric.storage.archives.save import save_file
from lightning.fabric.storage.paths import filesystem, location, remove
from tests.servers import Bucket
from tests.storage import tree  # noqa: F401  # registers the protocol


@pytest.fixture(autouse=True)
def _empty_memory() -> None:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("run/last.ckpt", Path("run/last.ckpt")),
        (Path("run/last.ckpt"), Path("run/last.ckpt")),
        ("file:///tmp/x.ckpt", Path("/tmp/x.ckpt")),
        ("s3://bucket/a b[1]*.ckpt", "s3://bucket/a b[1]*.ckpt"),
        ("simplecache::s3://bucket/x", "simplecache::s3://bucket/x"),
        (Path("odd:name/x"), Path("odd:name/x")),
        ("~/x.ckpt", Path.home() / "x.ckpt"),
        ("file:/tmp/x.ckpt", Path("/tmp/x.ckpt")),
        (Path("file:///tmp/x.ckpt"), Path("/tmp/x.ckpt")),
    ],
)
def test_local_paths_become_path_and_urls_stay_strings(given: object, expected: object) -> None:
    assert location.locate(given) == expected


@pytest.mark.parametrize("options", [{}, {"client_kwargs": {"auth": None}}])
def test_websites_are_reached_through_the_proxy_of_the_environment(options: dict[str, Any]) -> None:
    fs, _ = filesystem.filesystem(location.Url("https://host/x.ckpt", options))
    assert fs.client_kwargs["trust_env"] is True
    assert fs.client_kwargs.keys() == {"trust_env", *options.get("client_kwargs", {})}


@pytest.mark.parametrize("protocol", ["s3", "gs", "abfs", "hdfs", "memory"])
def test_a_path_made_from_a_url_is_taken_for_the_url(protocol: str) -> None:
    assert location.locate(Path(f"{protocol}://bucket/run/x.ckpt")) == f"{protocol}://bucket/run/x.ckpt"


def test_join_keeps_urls_whole_and_takes_a_trailing_slash() -> None:
    assert location.join("s3://bucket/run/", "meta.pt") == "s3://bucket/run/meta.pt"
    assert location.join(Path("run"), "meta.pt") == Path("run/meta.pt")


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
    assert "hunter2" not in location.display(secret)
    assert shown is None or location.display(secret) == shown


@pytest.mark.parametrize(
    "request_of_a_client",
    [
        "http://host/b?list-type=2&prefix=run/&max-keys=1&continuation-token=run/x&encoding-type=url",
        "https://host/b/o?maxResults=1&pageToken=x",
        "https://host/b?versions&key-marker=x&X-Amz-Date=20260101T000000Z",
    ],
)
def test_what_is_no_credential_is_displayed(request_of_a_client: str) -> None:
    assert location.display(request_of_a_client) == request_of_a_client


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
    remove.remove(location.join(location.locate(root), "a[1]*?.ckpt"))
    remove.remove(location.join(location.locate(root), "shards"))
    remove.remove(location.join(location.locate(root), "was-never-there"))
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
        remove.remove(location.locate(place.replace("s3://bucket", bucket.url)))
    assert (tmp_path / "precious").exists()
    assert bucket.names() == ["precious"]


def test_a_large_folder_is_removed_with_its_marks_first(bucket: Bucket) -> None:
    for name in ["meta.pt", ".metadata", *(f"{i}.distcp" for i in range(20))]:
        bucket.put(f"x.ckpt/{name}", b"1")
    remove.remove(f"{bucket.url}/x.ckpt")
    removed = [path.rpartition("/")[2] for method, path in bucket.requests if method == "DELETE"]
    assert set(removed[:2]) == {"meta.pt", ".metadata"}
    assert len(removed) == 22
    assert bucket.names() == []


def test_on_an_object_store_a_file_and_a_folder_of_one_name_are_told_apart(bucket: Bucket) -> None:
    place = f"{bucket.url}/last.ckpt"
    bucket.put("last.ckpt/meta.pt", b"1")
    assert filesystem.kind(place) == "directory"
    assert not filesystem.is_file(place)
    assert not filesystem.is_folder(place)  # nothing keeps a file from being written there
    bucket.put("last.ckpt", b"full")
    assert filesystem.is_file(place)
    remove.remove_folder(place)
    assert bucket.names() == ["last.ckpt"]


def test_what_another_process_wrote_is_seen_at_once(bucket: Bucket) -> None:
    place = f"{bucket.url}/run/x.ckpt"
    bucket.put("run/other", b"1")
    fsspec.url_to_fs(place)[0].ls(f"{bucket.name}/run")  # fills the listing cache
    assert not filesystem.is_file(place)
    bucket.put("run/x.ckpt", b"1")
    assert filesystem.is_file(place)
    assert filesystem.sizes_of_files(f"{bucket.url}/run") == {"other": 1, "x.ckpt": 1}


def test_a_denied_question_is_an_error_and_not_a_no(bucket: Bucket) -> None:
    with bucket.refusing(lambda method, path: 403), pytest.raises(PermissionError):
        filesystem.is_file(f"{bucket.url}/x.ckpt")


def test_what_a_client_repeats_of_a_url_with_a_password_is_hidden() -> None:
    told = location.display_about('Invalid bucket name "AKIA:secret@bucket"', "s3://AKIA:secret@bucket/x.ckpt")
    assert told == 'Invalid bucket name "***@bucket"'
    assert location.display_about("no such key", "s3://bucket/x.ckpt") == "no such key"


def test_a_password_that_the_client_repeats_does_not_reach_the_error_of_a_save() -> None:
    url = "s3://AKIA:verysecret@bucket/x.ckpt"  # which is no way to give it to S3
    with pytest.raises(OSError, match=r"Could not write s3://AKIA:\*\*\*@bucket") as raised:
        save_file({}, url, {"key": "a", "secret": "b"})
    assert "verysecret" not in str(raised.value)
