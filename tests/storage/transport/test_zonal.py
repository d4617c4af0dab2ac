"""Zonal buckets of Google's: what goes wrong on the way to one, and what is left there."""

from collections.abc import Callable
from itertools import count
from typing import Any

import fsspec
import pytest
import torch

from lightning.fabric.storage.archives.load import load_file
from lightning.fabric.storage.archives.save import save_file
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.paths.remove import remove
from lightning.fabric.storage.strategies import checkpoint_load, checkpoint_place, checkpoint_save
from lightning.fabric.storage.transport.open import open_source, open_writer
from tests.servers.zonal import Broken, Damaged, Lost, Refused, ZonalBucket, ZonalServer, lead_gcsfs_to
from tests.storage.states import assert_same

MIB = 2**20
NAME = "run/x.ckpt"
#: Three slices, the last of which is not full.
STATE = {"w": torch.arange(10 * MIB, dtype=torch.float32), "step": 3}


@pytest.fixture
def place(zonal: ZonalServer, monkeypatch: pytest.MonkeyPatch) -> ZonalBucket:
    lead_gcsfs_to(zonal, monkeypatch)
    monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
    zonal.written.clear()
    zonal.asked.clear()
    return ZonalBucket(zonal)


def once(step: str, error: type[Exception], number: int = 1) -> Callable[[str], None]:
    """Raises ``error`` when ``step`` is reached for the ``number``-th time."""
    reached = count(1)

    def fault(at: str) -> None:
        if at == step and next(reached) == number:
            raise error

    return fault


def always(step: str, error: type[Exception]) -> Callable[[str], None]:
    def fault(at: str) -> None:
        if at == step:
            raise error

    return fault


def test_what_is_sent_and_asked_for_at_a_time_is_bounded(place: ZonalBucket) -> None:
    url = f"{place.url}/{NAME}"
    save_file(STATE, url)
    assert sum(place.server.written) == len(place.get(NAME)) > 40 * MIB
    source = open_source(locate(url))
    content = bytearray(source.size)
    source.read_into(0, memoryview(content))
    source.close()
    assert content == place.get(NAME)
    assert place.server.asked == [16 * MIB, 16 * MIB, source.size - 32 * MIB]


@pytest.mark.parametrize(
    ("step", "number"),
    [
        *[("before data", number) for number in (1, 12)],
        *[("after data", number) for number in (12, 20)],
        *[(f"before {step}", 1) for step in ("create", "append", "finish")],
        *[(f"after {step}", 1) for step in ("finish", "move")],
    ],
)
def test_a_save_goes_on_where_the_store_has_got_to_when_a_stream_breaks(
    place: ZonalBucket, step: str, number: int
) -> None:
    first = once("before data", Broken, 12)  # after which the object is opened again, to append
    second = once(step, Broken, number)

    def fault(at: str) -> None:
        if step == "before append":
            first(at)
        second(at)

    with place.server.failing(fault):
        save_file(STATE, f"{place.url}/{NAME}")
    assert place.names() == [NAME]
    assert_same(load_file(f"{place.url}/{NAME}"), STATE)


def test_the_client_alone_loses_data_without_an_error(place: ZonalBucket) -> None:
    """If this fails, Google's client has been repaired, and ours may leave it to it to try again."""
    fs, path = fsspec.url_to_fs(f"{place.url}/{NAME}")
    with place.server.failing(once("before data", Broken, 12)):
        fs.pipe_file(path, bytes(40 * MIB), chunksize=16 * MIB)
    assert len(place.get(NAME)) < 40 * MIB


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        pytest.param(once("before data", Damaged, 3), "with the CRC-32C", id="damaged"),
        pytest.param(once("before data", Lost, 12), "the store keeps", id="lost"),
        pytest.param(always("before finish", Broken), "tried", id="never finalized"),
        pytest.param(always("before move", Refused), "renaming refused", id="never renamed"),
    ],
)
@pytest.mark.usefixtures("impatient")
def test_a_save_that_the_store_has_not_whole_is_an_error_and_leaves_the_old_checkpoint(
    place: ZonalBucket, fault: Callable[[str], None], reason: str
) -> None:
    place.put(NAME, b"old")
    with place.server.failing(fault), pytest.raises(OSError, match=reason) as caught:
        save_file(STATE, f"{place.url}/{NAME}")
    assert "What was there before, if anything, is unchanged" in str(caught.value)
    assert place.get(NAME) == b"old"
    assert place.names() == [NAME]


def test_the_old_checkpoint_is_there_until_the_new_one_is_whole(place: ZonalBucket) -> None:
    place.put(NAME, b"old")
    with open_writer(locate(f"{place.url}/{NAME}")) as file:
        for _ in range(3):
            file.write(bytes(16 * MIB))
            assert place.get(NAME) == b"old"
    assert place.get(NAME) == bytes(48 * MIB)
    assert place.unfinished_uploads() == []


@pytest.mark.parametrize("error", [Broken, Damaged])
def test_a_range_that_breaks_off_or_comes_damaged_is_read_again(place: ZonalBucket, error: type[Exception]) -> None:
    save_file(STATE, f"{place.url}/{NAME}")
    with place.server.failing(once("before range", error, 9)):
        assert_same(load_file(f"{place.url}/{NAME}"), STATE)


@pytest.mark.usefixtures("impatient")
def test_a_range_that_always_comes_damaged_is_an_error(place: ZonalBucket) -> None:
    save_file(STATE, f"{place.url}/{NAME}")
    with place.server.failing(always("before range", Damaged)), pytest.raises(OSError, match=r"x\.ckpt.*[Cc]hecksum"):
        load_file(f"{place.url}/{NAME}")


def test_shards_are_replaced_and_removed_and_leave_no_folder_and_no_temporary_object(place: ZonalBucket) -> None:
    checkpoint = locate(f"{place.url}/{NAME}")
    state: dict[str, Any] = {"model": {"w": torch.arange(12.0)}}
    checkpoint_save.save_sharded(state, {"epoch": 1}, checkpoint)
    with open_writer(locate(f"{place.url}/{NAME}/new.distcp")) as file:
        file.write(bytes(33 * MIB))
        (unfinished,) = place.unfinished_uploads()
    place.put(unfinished, b"what a process that was killed leaves")
    checkpoint_save.save_sharded(state, {"epoch": 2}, checkpoint)
    assert unfinished not in place.names()
    assert len(place.names()) == 4
    found = checkpoint_place.find_checkpoint(checkpoint)
    assert checkpoint_load.load_metadata(found)["epoch"] == 2
    state["model"]["w"] = torch.zeros(12)
    checkpoint_load.load_shards(state, found)
    assert torch.equal(state["model"]["w"], torch.arange(12.0))
    remove(checkpoint)
    assert place.names() == []
    assert checkpoint.kind() == "nothing"
