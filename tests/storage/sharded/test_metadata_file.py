"""Sharded checkpoints are whole or not at all, in one process; tests/strategies has them with several ranks."""

import copyreg
import enum
import io
import logging
import os
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException, Metadata
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

from lightning.fabric.storage.collectives.errors import failures_of_ranks
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.paths.place import LocalPlace, Place
from lightning.fabric.storage.sharded import commit, metadata_file
from lightning.fabric.storage.sharded.checksums import FileRecords, Record, records_of
from lightning.fabric.storage.sharded.metadata_unpickler import unpickle
from lightning.fabric.storage.strategies import checkpoint_load, checkpoint_place, checkpoint_save
from lightning.fabric.storage.tools import consolidate, verify
from lightning.fabric.storage.tools.discover import why_incomplete
from lightning.fabric.storage.transport.sink import Sink
from tests.servers import Bucket

WEIGHTS = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(2, dtype=torch.bfloat16)}


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, bucket: Bucket, tmp_path: Path) -> Place:
    return locate({"local": str(tmp_path), "s3": bucket.url}[request.param] + "/run/last.ckpt")


def save(place: Place, number: float) -> None:
    state = {"model": {name: value * number for name, value in WEIGHTS.items()}, "note": f"note {number}"}
    checkpoint_save.save_sharded(state, {"epoch": number, "rng": torch.tensor([number])}, place)


def load(path: Any) -> float:
    """Which save there is, if all of it is of the same."""
    state: dict[str, Any] = {"model": {name: torch.zeros_like(value) for name, value in WEIGHTS.items()}, "note": ""}
    found = path if isinstance(path, checkpoint_place.FoundCheckpoint) else checkpoint_place.find_checkpoint(path)
    checkpoint_load.load_shards(state, found)
    meta = checkpoint_load.load_metadata(found)
    number = meta["epoch"]
    for name, value in WEIGHTS.items():
        assert torch.equal(state["model"][name], value * number)
    assert state["note"] == f"note {number}"
    assert meta["rng"].tolist() == [number]
    return float(number)


def names(place: Place, bucket: Bucket) -> list[str]:
    if place.is_local:
        root = Path(place.raw).parent.parent
        return sorted(found.relative_to(root).as_posix() for found in root.rglob("*.*"))
    return [*bucket.names()]


def change(place: Place, bucket: Bucket, edit: Callable[[str, bytes], bytes | None]) -> None:
    """Changes the files from outside; None removes one."""
    folder = Path(place.raw) if place.is_local else None
    for name in os.listdir(folder) if folder else [n.rpartition("/")[2] for n in bucket.names()]:
        old = (folder / name).read_bytes() if folder else bucket.get(f"run/last.ckpt/{name}")
        new = edit(name, old)
        if new is None:
            (folder / name).unlink() if folder else bucket.remove(f"run/last.ckpt/{name}")
        elif new != old:
            (folder / name).write_bytes(new) if folder else bucket.put(f"run/last.ckpt/{name}", new)


class Unpicklable:
    """Fails a save when its shard has been written."""

    def __init__(self, meanwhile: Callable[[], Any]) -> None:
        self._meanwhile = meanwhile

    def __reduce__(self) -> Any:
        self._meanwhile()
        raise pickle.PicklingError("not this")


def fail_to_save(path: Path, meanwhile: Callable[[], Any]) -> list[str]:
    """What is left."""
    with pytest.raises((OSError, RuntimeError), match="not this"):
        checkpoint_save.save_sharded({"model": WEIGHTS}, {"epoch": Unpicklable(meanwhile)}, path)
    return sorted(found.relative_to(path.parent).as_posix() for found in path.parent.rglob("*"))


def test_a_save_that_fails_leaves_no_folder_that_was_not_there_before(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    begun: list[str] = []
    assert fail_to_save(path, lambda: begun.extend(os.listdir(path))) == []
    assert any(name.endswith("_0_0.distcp") for name in begun)
    path.write_text("a file")
    assert fail_to_save(path, lambda: None) == ["x.ckpt"]
    path.unlink()
    path.mkdir()
    assert fail_to_save(path, lambda: None) == ["x.ckpt"]


def test_a_save_that_fails_leaves_the_files_of_others_in_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    assert fail_to_save(path, (path / "notes.txt").touch) == ["x.ckpt", "x.ckpt/notes.txt"]
    assert fail_to_save(path, lambda: None) == ["x.ckpt", "x.ckpt/notes.txt"]


def test_meta_pt_is_for_stock_and_is_not_what_is_loaded_here(place: Place, bucket: Bucket) -> None:
    save(place, 1)
    seen = []

    def edit(name: str, content: bytes) -> bytes | None:
        if name != "meta.pt":
            return content
        seen.append(torch.load(io.BytesIO(content))["epoch"])
        return None  # as if the save had been killed before it was written

    change(place, bucket, edit)
    assert seen == [1]
    assert load(place) == 1


def test_shards_without_metadata_are_refused_as_an_interrupted_save(place: Place, bucket: Bucket) -> None:
    save(place, 1)
    change(place, bucket, lambda name, old: None if name == ".metadata" else old)
    with pytest.raises(FileNotFoundError, match=r"incomplete: .metadata is missing.*interrupted"):
        checkpoint_place.find_checkpoint(place)
    assert why_incomplete(place) is not None
    save(place, 2)  # which also removes them
    assert load(place) == 2
    assert len([name for name in names(place, bucket) if name.endswith(".distcp")]) == 2


def test_where_there_is_nothing_no_checkpoint_is_found(place: Place) -> None:
    found = checkpoint_place.find_checkpoint(place)
    assert not checkpoint_place.is_sharded_checkpoint(found)
    assert not checkpoint_place.is_full_checkpoint(found)
    assert why_incomplete(place) is not None
    with pytest.raises(FileNotFoundError, match="There is no sharded checkpoint"):
        checkpoint_load.load_shards({}, found)


def test_a_newer_format_is_refused_and_says_so(tmp_path: Path) -> None:
    save(tmp_path, 1)
    metadata, _ = metadata_file.read_metadata(locate(tmp_path))
    metadata.lightning["format"] = 3  # type: ignore[attr-defined]
    metadata_file.write_metadata(locate(tmp_path), metadata)
    with pytest.raises(OSError, match="saved in format 3, and this release reads formats up to 2"):
        load(tmp_path)


def test_checkpoints_of_format_1_load_and_are_verified(tmp_path: Path) -> None:
    save(tmp_path / "x.ckpt", 1)
    metadata, _ = metadata_file.read_metadata(locate(tmp_path / "x.ckpt"))
    ours: dict[str, Any] = metadata.lightning  # type: ignore[attr-defined]
    ours["format"] = 1
    for name, file in ours["files"].items():
        records = [tuple(record) for record in records_of(file)]
        assert records
        ours["files"][name] = {"size": file["size"], "records": records}
    metadata_file.write_metadata(locate(tmp_path / "x.ckpt"), metadata)
    assert load(tmp_path / "x.ckpt") == 1
    assert str(verify.verify(locate(tmp_path / "x.ckpt"))).endswith("all checksums right")
    consolidate.consolidate(locate(tmp_path / "x.ckpt"), locate(tmp_path / "one.ckpt"))
    assert torch.equal(torch.load(tmp_path / "one.ckpt")["model"]["w"], WEIGHTS["w"])
    shard = next((tmp_path / "x.ckpt").glob("*_0_0.distcp"))
    shard.write_bytes(bytes(shard.stat().st_size))
    assert verify.verify(locate(tmp_path / "x.ckpt")).problems


def test_every_byte_of_every_file_has_a_checksum_and_metadata_holds_built_in_types(tmp_path: Path) -> None:
    save(tmp_path, 1)
    described = metadata_file.read_metadata(locate(tmp_path))[0].lightning  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(described)) == described
    assert "lightning." not in str(pickle.dumps(described))  # nothing to import
    assert sorted(described["files"]) == sorted(path.name for path in tmp_path.glob("*.distcp"))
    for name, file in described["files"].items():
        at = 0
        for record in records_of(file):
            for start, end, *_ in record.blocks():
                assert start == at
                at = end
        assert at == file["size"] == (tmp_path / name).stat().st_size


def test_a_checkpoint_without_anything_beside_the_shards_is_complete(tmp_path: Path) -> None:
    save(tmp_path, 1)
    checkpoint_save.save_sharded({"w": torch.ones(3)}, None, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".metadata", next(tmp_path.glob("*.distcp")).name]
    assert checkpoint_load.load_metadata(tmp_path) == {}


def test_stock_checkpoints_load_and_need_their_meta_pt(tmp_path: Path) -> None:
    state = {"w": torch.arange(3.0)}
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path)
    with pytest.raises(FileNotFoundError, match=r"meta\.pt is missing"):
        checkpoint_place.find_checkpoint(tmp_path)
    torch.save({"epoch": 5}, tmp_path / "meta.pt")
    into = {"w": torch.zeros(3)}
    found = checkpoint_place.find_checkpoint(tmp_path)
    checkpoint_load.load_shards(into, found)
    assert torch.equal(into["w"], state["w"])
    assert checkpoint_load.load_metadata(found) == {"epoch": 5}
    next(tmp_path.glob("*.distcp")).unlink()
    with pytest.raises(FileNotFoundError, match=r"__0_0\.distcp is missing"):
        checkpoint_place.find_checkpoint(tmp_path)


def test_the_size_of_a_shard_is_told_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []  # the size of the parts of an upload depends on it
    monkeypatch.setattr(Sink, "expect", lambda sink, size: told.append(size))
    state = {str(number): torch.ones(100_000 * number) for number in range(4)}
    checkpoint_save.save_sharded(state, None, tmp_path)
    (shard,) = tmp_path.glob("*.distcp")
    assert told[0] == pytest.approx(shard.stat().st_size, rel=0.01)


def test_a_state_that_the_checkpoint_lacks_is_an_error_unless_it_may_lack_it(place: Place) -> None:
    save(place, 1)
    state = {"model": {"w": torch.zeros(3, 4), "extra": torch.full((2,), 9.0)}}
    with pytest.raises(RuntimeError, match=r"Could not load the sharded checkpoint .*Missing key.*model\.extra"):
        checkpoint_load.load_shards(state, place)
    checkpoint_load.load_shards(state, place, strict=False)
    assert torch.equal(state["model"]["w"], WEIGHTS["w"])
    assert state["model"]["extra"].tolist() == [9, 9]


def test_whoever_may_read_but_not_list_can_load(bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    place = locate(f"{bucket.url}/x.ckpt")
    save(place, 1)
    with bucket.refusing(lambda method, path: 403 if "list-type" in path else None), caplog.at_level(logging.WARNING):
        assert load(place) == 1
    assert "Cannot look whether" in caplog.text


def test_a_value_that_cannot_be_saved_fails_the_save_and_leaves_the_old_checkpoint(place: Place) -> None:
    save(place, 1)
    with pytest.raises(RuntimeError, match=r"Could not save the sharded checkpoint .*rank 0: .*pickle"):
        checkpoint_save.save_sharded({"w": torch.ones(1)}, {"epoch": lambda: 1}, place)
    assert load(place) == 1


class Unsavable:
    """Raises an error of a built-in type that cannot be pickled either."""

    def __reduce__(self) -> Any:
        raise KeyError(self)


def test_whatever_a_value_raises_can_be_sent_to_other_ranks(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="rank 0: RuntimeError: KeyError: ") as raised:
        checkpoint_save.save_sharded({"w": torch.ones(1), "value": Unsavable()}, None, tmp_path)
    sent = pickle.loads(pickle.dumps(raised.value.__cause__))
    assert list(sent.failures) == [0]


def failing(reasons: dict[int, Exception]) -> Exception:
    """What a save raises that has failed on these ranks."""
    shown = {rank: (reason, traceback.StackSummary()) for rank, reason in reasons.items()}
    with (
        pytest.raises((OSError, RuntimeError)) as raised,
        failures_of_ranks("save", locate("s3://bucket/x.ckpt"), SimpleNamespace(error=None)),
    ):
        raise CheckpointException("save", shown)
    return raised.value


def test_what_a_store_tells_each_of_a_thousand_ranks_is_said_once() -> None:
    error = failing(
        {rank: PermissionError(f"Could not write x/__5e_{rank}_0.distcp in {rank} ms: no.") for rank in range(1000)}
    )
    assert str(error) == (
        "Could not save the sharded checkpoint s3://bucket/x.ckpt: rank 0, 1, 2, 3 and 996 more: PermissionError: Could"
        " not write x/__5e_0_0.distcp in 0 ms: no."
    )
    assert len(traceback.format_exception(error)) < 10  # and not the tracebacks of all of them


def test_each_reason_of_a_rank_is_said() -> None:
    error = failing({0: OSError("disk 1 is full"), 1: OSError("disk 2 is lost"), 2: OSError("disk 3 is full")})
    assert str(error).endswith("rank 0 and 2: OSError: disk 1 is full; rank 1: OSError: disk 2 is lost.")


def test_where_a_file_was_the_checkpoint_is_in_its_place_without_meta_pt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("no space is left")

    (tmp_path / "last.ckpt").write_bytes(b"a full state")
    monkeypatch.setattr("lightning.fabric.storage.sharded.commit.save_file", refuse)
    with pytest.raises(OSError, match=r"is saved, and loads here, but not with stock Lightning.*no space is left"):
        save(tmp_path / "last.ckpt", 1)
    assert load(tmp_path / "last.ckpt") == 1
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_what_a_network_file_system_shows_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[dict[str, int]] = [{}, {"a": 1}, {"a": 3}]
    monkeypatch.setattr(LocalPlace, "sizes_of_files", lambda folder: looks.pop(0))
    monkeypatch.setattr(commit, "_LOOK_S", 0.01)
    commit.await_files(locate(tmp_path), {"a": FileRecords.of([Record(0, 3, 0, 3, b"")])})
    assert looks == []


def test_an_interruption_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning.fabric.storage.sharded.record_writer.Checksums.update", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1)
    assert list(tmp_path.rglob("*.distcp")) == []


def test_options_of_the_save_reach_the_store(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
    place = checkpoint_place.locate_checkpoint(f"{bucket.url}/x.ckpt", options)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    save(place, 1)
    assert load(place) == 1
    with pytest.raises(TypeError, match="Storage options are a dictionary"):
        checkpoint_place.locate_checkpoint(f"{bucket.url}/x.ckpt", "http://127.0.0.1:9")  # type: ignore[arg-type]


class _AsEarlyPython311(pickle.Pickler):
    """Pickles the members of enumerations as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, enum.Enum) else NotImplemented


def _as_early_python_311(obj: Any) -> bytes:
    file = io.BytesIO()
    _AsEarlyPython311(file, protocol=4).dump(obj)
    return file.getvalue()


def test_metadata_that_an_early_python_311_has_pickled_are_read() -> None:
    properties = TensorProperties(torch.float16, memory_format=torch.channels_last)
    entry = TensorStorageMetadata(properties, torch.Size([2]), [ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))])
    content = _as_early_python_311(Metadata({"w": entry}))
    assert b"getattr" in content
    assert unpickle(content) == pickle.loads(content)


def _with_strides(strides: Any) -> bytes:
    """Pickles properties of a tensor as PyTorch 2.15 does."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if not isinstance(obj, TensorProperties):
                return NotImplemented
            state = (torch.float16, torch.strided, False, 0, False, strides)
            return copyreg.__newobj__, (TensorProperties,), state

    file = io.BytesIO()
    Pickler(file, protocol=4).dump(TensorProperties())
    return file.getvalue()


@pytest.mark.parametrize("strides", [None, (3, 1)])
def test_metadata_that_pytorch_2_15_has_pickled_with_strides_are_read(strides: tuple[int, ...] | None) -> None:
    read = unpickle(_with_strides(strides))
    assert type(read) is TensorProperties
    assert (read.dtype, read.memory_format, read.strides) == (torch.float16, torch.contiguous_format, strides)


@pytest.mark.parametrize("strides", [[1], (1, "1"), (0,) * 1001])
def test_strides_that_are_no_short_tuple_of_numbers_are_refused(strides: Any) -> None:
    with pytest.raises(pickle.UnpicklingError, match="strides"):
        unpickle(_with_strides(strides))


@pytest.mark.parametrize("wanted", [(torch.Size, "__class__"), (Metadata, "__init__"), ("a", "join")])
def test_metadata_get_no_attribute_of_anything_else(wanted: tuple[Any, str]) -> None:
    class Asks:
        def __reduce__(self) -> Any:
            return getattr, wanted

    with pytest.raises(pickle.UnpicklingError, match="asks for an attribute"):
        unpickle(pickle.dumps({"w": Asks()}, protocol=4))
