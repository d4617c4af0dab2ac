"""Files that take the place of folders of shards, and the reverse; and what is left when that is interrupted."""

import ctypes
import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.sftp import SFTPFileSystem

from lightning.fabric.storage.paths import replace
from lightning.fabric.storage.paths.location import AnyPath, locate
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.paths.replace import remove_leftovers, replace_by_folder
from lightning.fabric.storage.transport.open import open_reader, open_writer
from tests.servers.sftp import sftp_server
from tests.storage.tree import TreeFileSystem  # registers the protocols

SIDE = ".0123456789ab."


def refuse_exchange(patch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(one: bytes, other: bytes) -> int:
        ctypes.set_errno(number)
        return -1

    patch.setattr(replace, "_system_call", lambda: refuse)


@pytest.fixture(params=["local", "local without exchange", "memory", "tree", "generic", "sftp", "ftp"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Where a checkpoint is to be, in a folder that has nothing else."""
    if request.param == "memory":
        yield locate(f"{request.getfixturevalue('memory')}/run/x [1].ckpt")
    elif request.param == "sftp":
        SFTPFileSystem.clear_instance_cache()
        with sftp_server(tmp_path) as url:
            yield locate(f"{url}/run/x [1].ckpt")
        SFTPFileSystem.clear_instance_cache()
    elif request.param == "ftp":
        yield locate(f"{request.getfixturevalue('ftp')}/run/x [1].ckpt")
    elif request.param.startswith("local"):
        if request.param.endswith("without exchange"):
            refuse_exchange(monkeypatch, errno.EINVAL)
        yield locate(tmp_path / "run" / "x [1].ckpt")
    else:
        yield locate(f"{request.param}://{tmp_path}/run/x [1].ckpt")


def write(path: AnyPath, content: bytes) -> None:
    with open_writer(locate(path)) as file:
        file.write(content)


def read(path: AnyPath) -> bytes:
    with open_reader(locate(path)) as file:
        return file.read()


def write_shards(path: AnyPath, content: bytes) -> None:
    for name in ("__0_0.distcp", ".metadata", "meta.pt"):
        write(locate(path) / name, content)


def names_beside(place: Place) -> list[str]:
    return place.parent.list_names()


def test_a_file_takes_the_place_of_shards(place: Place) -> None:
    write_shards(place, b"old")
    write(place, b"new")
    assert read(place) == b"new"
    assert names_beside(place) == ["x [1].ckpt"]


def test_a_file_takes_the_place_of_what_is_left_of_shards(place: Place) -> None:
    for name in ("__0123456789ab_0_0.distcp", ".0123456789abcdef.tmp"):
        write(place / name, b"dead")
    write(place, b"new")
    assert read(place) == b"new"


@pytest.mark.parametrize("name", ["notes.txt", "deep/.metadata"])
def test_any_other_folder_stays_and_is_an_error(place: Place, name: str) -> None:
    write(place / name, b"mine")
    write(place / "__0_0.distcp", b"mine")
    with pytest.raises(IsADirectoryError, match=r"x \[1\]\.ckpt"):
        write(place, b"new")
    assert read(place / name) == b"mine"
    assert names_beside(place) == ["x [1].ckpt"]


@pytest.mark.parametrize("there", ["file", "shards", "nothing"])
def test_a_folder_takes_the_place_of_whatever_is_there(place: Place, there: str) -> None:
    if there == "file":
        write(place, b"old")
    elif there == "shards":
        write_shards(place, b"old")
    new = place.beside(f"{SIDE}new")
    write_shards(new, b"new")
    replace_by_folder(new, place)
    assert place.list_names() == [".metadata", "__0_0.distcp", "meta.pt"]
    assert read(place / "meta.pt") == b"new"
    assert names_beside(place) == ["x [1].ckpt"]


def test_dead_saves_are_cleaned_up_after_and_nothing_else(place: Place) -> None:
    write_shards(place, b"new")
    for name in ("old", "new"):
        write_shards(place.beside(f"{SIDE}{name}"), b"dead")
    write(place.beside(".ba9876543210.old"), b"dead")
    write(place / ".0123456789abcdef.tmp", b"dead")
    with replace.temporary_beside("x [1].ckpt") as dead:
        pass
    stay = ["y.ckpt.0123456789ab.old", "x [1].ckpt.old", "x [1].ckpt.0123456789AB.old", ".0123456789abcdef.tmp"]
    for name in [dead, *stay]:
        write(place.parent / name, b"1")
    remove_leftovers(place)
    assert names_beside(place) == sorted(["x [1].ckpt", *stay])
    assert place.list_names() == [".metadata", "__0_0.distcp", "meta.pt"]


def test_a_save_that_goes_on_in_this_process_keeps_its_temporary_file(place: Place) -> None:
    with open_writer(place) as file:
        file.write(b"new")
        remove_leftovers(place)
    assert read(place) == b"new"


@pytest.mark.parametrize("protocol", ["tree", "generic"])
def test_shards_that_could_not_be_replaced_get_their_name_back(
    protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = locate(f"{protocol}://{tmp_path}/x.ckpt")
    write_shards(place, b"old")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("connection dropped")

    move = replace.move
    monkeypatch.setattr("lightning.fabric.storage.transport.backends.fsspec.move", fail)
    with pytest.raises(ConnectionError, match="connection dropped"):
        write(place, b"new")
    assert read(place / "meta.pt") == b"old"

    new = place.beside(f"{SIDE}new")
    write_file(tmp_path / f"x.ckpt{SIDE}new" / "meta.pt", b"new")
    moves = iter([move, fail, move])
    monkeypatch.setattr(replace, "move", lambda *args: next(moves)(*args))
    with pytest.raises(ConnectionError, match="connection dropped"):
        replace_by_folder(new, place)
    assert place.list_names() == [".metadata", "__0_0.distcp", "meta.pt"]
    assert read(place / "meta.pt") == b"old"
    assert names_beside(place) == ["x.ckpt", f"x.ckpt{SIDE}new"]


def test_a_file_that_another_thread_saves_while_the_old_one_is_set_aside_takes_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = locate(f"tree://{tmp_path}/x.ckpt")
    write(place, b"old")
    other = threading.Thread(target=write, args=(place, b"other"))
    rename = TreeFileSystem.mv
    monkeypatch.setattr(TreeFileSystem, "refuses_overwriting", "loudly")

    def mv(fs: TreeFileSystem, path: str, target: str, **options: Any) -> None:
        rename(fs, path, target, **options)
        if target.endswith(".old") and other.ident is None:
            other.start()
            other.join(timeout=0.5)  # long enough to come between, if it may

    monkeypatch.setattr(TreeFileSystem, "mv", mv)
    write(place, b"new")
    other.join()
    assert read(place) == b"other"
    assert names_beside(place) == ["x.ckpt"]


def write_file(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)


def test_the_system_exchanges_a_file_and_a_folder(tmp_path: Path) -> None:
    write_shards(tmp_path / "folder", b"old")
    write(tmp_path / "file", b"new")
    if not replace.exchange(tmp_path / "file", tmp_path / "folder"):
        pytest.skip("this system or the file system of temporary folders cannot exchange names")
    assert read(tmp_path / "folder") == b"new"
    assert read(tmp_path / "file" / "meta.pt") == b"old"
    with pytest.raises(FileNotFoundError, match="nothing"):
        replace.exchange(tmp_path / "file", tmp_path / "nothing")


def test_an_exchange_that_is_refused_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tmp_path / "x.ckpt", b"old")
    refuse_exchange(monkeypatch, errno.EACCES)
    with pytest.raises(PermissionError, match=r"x\.ckpt.*What was there before, if anything, is unchanged"):
        write(tmp_path / "x.ckpt", b"new")
    assert read(tmp_path / "x.ckpt" / "meta.pt") == b"old"
    assert os.listdir(tmp_path) == ["x.ckpt"]


def whole(path: Path) -> str | None:
    """Which of the two is at a path, if it is all there."""
    shards = [path / name for name in ("__0_0.distcp", ".metadata", "meta.pt")]
    files = [path] if path.is_file() else shards if all(shard.is_file() for shard in shards) else []
    contents = {file.read_bytes().decode() for file in files}
    return contents.pop() if len(contents) == 1 else None


def watch(patch: pytest.MonkeyPatch, look: Callable[[], None]) -> None:
    """Calls ``look`` before and after whatever changes a name."""
    for owner, name in [
        (replace, "exchange"),
        (shutil, "rmtree"),
        *[(os, name) for name in ("replace", "rename", "unlink", "rmdir")],
        *[(Path, name) for name in ("rename", "unlink")],
    ]:
        patch.setattr(owner, name, watched(getattr(owner, name), look))


def watched(call: Callable[..., Any], look: Callable[[], None]) -> Callable[..., Any]:
    def between(*args: Any, **kwargs: Any) -> Any:
        look()
        result = call(*args, **kwargs)
        look()
        return result

    return between


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("new_kind", ["file", "folder"])
def test_whenever_it_is_killed_the_old_one_or_the_new_one_is_whole(
    new_kind: str, can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, seen = tmp_path / "x.ckpt", []
    if not can_exchange:
        refuse_exchange(monkeypatch, errno.ENOSYS)

    def look() -> None:
        at_place = whole(place)
        aside = [whole(path) for path in tmp_path.glob("x.ckpt.*.old")]
        seen.append(at_place or ("aside" if aside == ["old"] else "lost"))

    if new_kind == "file":
        write_shards(place, b"old")
        watch(monkeypatch, look)
        write(place, b"new")
    else:
        write(place, b"old")
        write_shards(tmp_path / f"x.ckpt{SIDE}new", b"new")
        watch(monkeypatch, look)
        replace_by_folder(locate(tmp_path / f"x.ckpt{SIDE}new"), locate(place))
    monkeypatch.undo()
    order = list(dict.fromkeys(seen))
    if can_exchange and order != ["old", "new"]:
        assert order == ["old", "aside", "new"]
        pytest.skip("this system or the file system of temporary folders cannot exchange names")
    assert order == ["old", "new"] if can_exchange else ["old", "aside", "new"]
    assert sorted(seen, key=order.index) == seen
    assert len(seen) > 4
    assert os.listdir(tmp_path) == ["x.ckpt"]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_what_cannot_be_removed_is_told_and_goes_with_a_later_save(
    can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "x.ckpt"
    write_shards(place, b"old")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise PermissionError("not now")

    with monkeypatch.context() as patch:
        if not can_exchange:
            refuse_exchange(patch, errno.ENOTSUP)
        patch.setattr(shutil, "rmtree", fail)
        write(place, b"new")
    assert read(place) == b"new"
    assert "Could not remove what is left of an earlier save" in caplog.text
    assert len(os.listdir(tmp_path)) == 2
    remove_leftovers(locate(place))
    assert os.listdir(tmp_path) == ["x.ckpt"]


def test_an_interruption_while_the_old_one_is_removed_is_seen_and_leaves_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "x.ckpt"
    write_shards(place, b"old")

    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write(place, b"new")
    assert read(place) == b"new"
    remove_leftovers(locate(place))
    assert os.listdir(tmp_path) == ["x.ckpt"]


def test_a_link_goes_on_to_be_one_when_the_shards_behind_it_are_replaced(tmp_path: Path) -> None:
    write_shards(tmp_path / "there" / "x.ckpt", b"old")
    (tmp_path / "last.ckpt").symlink_to(tmp_path / "there" / "x.ckpt")
    write_file(tmp_path / "there" / f"x.ckpt{SIDE}old", b"dead")
    write(tmp_path / "last.ckpt", b"new")
    remove_leftovers(locate(tmp_path / "last.ckpt"))
    assert (tmp_path / "last.ckpt").is_symlink()
    assert read(tmp_path / "there" / "x.ckpt") == b"new"
    assert os.listdir(tmp_path / "there") == ["x.ckpt"]


def test_leftovers_that_cannot_be_looked_for_are_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("connection dropped")

    monkeypatch.setattr(TreeFileSystem, "ls", fail)
    remove_leftovers(locate(f"tree://{tmp_path}/x.ckpt"))
    assert "x.ckpt (ConnectionError: connection dropped)" in caplog.text
