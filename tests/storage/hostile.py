"""Checkpoints of someone who means harm, each by its name: ``CASES[name](path)`` makes it.

As a program, it does with one after the other what users do with checkpoints, and prints a line of JSON for each: what
came of it, how long it took and how much memory. Every case is a fork, for one may take down its process.
"""

import io
import json
import os
import pickle
import re
import resource
import signal
import struct
import sys
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from lightning.fabric.storage.archives import load
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.sharded import metadata_file
from lightning.fabric.storage.strategies import checkpoint_load, checkpoint_place, checkpoint_save, full_state
from lightning.fabric.storage.tools import consolidate, discover, verify

#: What code in a checkpoint makes, in the folder where it runs.
MARK = "code-has-run"
TENSOR = torch.ones(3)
STATE: dict[str, Any] = {"model": {"w": TENSOR, "note": ["x"]}}
META = {"epoch": 3}
Case = Callable[[Path], None]
CASES: dict[str, Case] = {}
#: Cases that are sound but for code in them, which verifying does not run.
SOUND: set[str] = set()


class Code:
    """Runs when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, (MARK,)


def case(name: str, is_sound: bool = False) -> Callable[[Case], Case]:
    def add(make: Case) -> Case:
        CASES[name] = make
        if is_sound:
            SOUND.add(name)
        return make

    return add


def stock(folder: Path, state: dict[str, Any] = STATE, meta: Any = META) -> Any:
    """Saves as stock torch and Lightning do, and returns the metadata."""
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    torch.save(meta, folder / "meta.pt")
    return pickle.loads((folder / ".metadata").read_bytes())


def ours(folder: Path, state: dict[str, Any] = STATE, meta: Any = META) -> Any:
    """Saves as this library does, and returns the metadata."""
    checkpoint_save.save_sharded(state, meta, folder)
    return metadata_file.read_metadata(locate(folder))[0]


def write(folder: Path, metadata: Any) -> None:
    """Replaces the metadata, as whoever saved them would: with the right checksum if they are ours."""
    if hasattr(metadata, "lightning"):
        metadata_file.write_metadata(locate(folder), metadata)
    else:
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def changed(change: Callable[[Any], None], save: Callable[[Path], Any]) -> Case:
    def make(folder: Path) -> None:
        metadata = save(folder)
        change(metadata)
        write(folder, metadata)

    return make


def raw(pickled: bytes) -> Case:
    """A folder whose ``.metadata`` is that pickle."""

    def make(folder: Path) -> None:
        stock(folder)
        (folder / ".metadata").write_bytes(pickled)

    return make


# code -----------------------------------------------------------------------------------------------------------------


@case("code in .metadata of torch")
def _(folder: Path) -> None:
    metadata = stock(folder)
    metadata.planner_data = Code()
    write(folder, metadata)


@case("code in .metadata of ours")
def _(folder: Path) -> None:
    metadata = ours(folder)
    metadata.lightning["more"] = Code()
    write(folder, metadata)


CASES["code instead of .metadata"] = raw(pickle.dumps(Code()))
for writer in (stock, ours):
    name = writer.__name__
    case(f"code in an object of a shard ({name})", True)(
        partial(writer, state={"model": {"w": TENSOR, "note": [Code()]}})
    )
    case(f"code beside model and optimizer ({name})", True)(partial(writer, meta={"epoch": Code()}))
case("code in a file", True)(lambda path: torch.save({"w": TENSOR, "code": Code()}, path))
case("code in a file of the old format")(
    lambda path: torch.save({"w": TENSOR, "code": Code()}, path, _use_new_zipfile_serialization=False)
)


@case("code in the class of a tensor's type")
def _(folder: Path) -> None:
    stock(folder)
    # setting an attribute of torch's class, as a pickle can with the state of an object
    module = b"\x8c\x29torch.distributed.checkpoint.metadata"
    pickled = b"\x80\x04" + module + b"\x8c\x0dMetadataIndex\x93N}\x8c\x06__eq__Ns\x86b."
    (folder / ".metadata").write_bytes(pickled)


# names ----------------------------------------------------------------------------------------------------------------

NAMES = [
    "/etc/hostname",
    "../x",
    "a/../../x",
    "s3://bucket/x",
    "file:///etc/hostname",
    "..\\x",
    "a\0b",
    "a\nb",
    "",
    ".",
]


def rename(metadata: Any, name: str) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = name


def rename_ours(metadata: Any, name: str) -> None:
    files = metadata.lightning["files"]
    files[name] = files.pop(metadata.lightning["meta"])
    metadata.lightning["meta"] = name


for name in NAMES:
    CASES[f"a shard called {name!r}"] = changed(partial(rename, name=name), stock)
    CASES[f"a file of ours called {name!r}"] = changed(partial(rename_ours, name=name), ours)


# many objects of few bytes -------------------------------------------------------------------------------------------


def called(module: str, name: str, *arguments: bytes) -> bytes:
    """A call, of what is called so, as opcodes."""
    names = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
    return names + b"\x93(" + b"".join(arguments) + b"tR"


def number(value: int) -> bytes:
    data = value.to_bytes(16, "little", signed=True)
    return b"\x8a\x10" + data


def deep(levels: int) -> bytes:
    """Iterators over iterators."""
    starts = b"\x8c\x09itertools\x8c\x05chain\x93("
    return starts * levels + REPEAT + b"tR" * levels


START = b"\x80\x04"
REPEAT = called("itertools", "repeat", b"N", number(10**9))
COLUMN = b"B" + struct.pack("<I", 40_000) + bytes(40_000)
UNPACK = called("_struct", "unpack", b"\x8c\x07<40000B", b"h\x00")
PICKLES = {
    "a list of a thousand million": called("builtins", "list", REPEAT),
    "a list of all numbers": called("builtins", "list", called("builtins", "range", b"K\0", number(2**60), b"K\1")),
    "a list without an end": called("builtins", "list", called("itertools", "repeat", b"N")),
    "a size without an end": called("torch", "Size", called("itertools", "repeat", b"K\1")),
    "a column again and again": COLUMN + b"\x940" + b"]" + (UNPACK + b"a") * 20_000,
    "a place of the memo that is far away": b"Nr\xff\xff\xff\xff",
    "bytes that are not there": b"\x8e" + struct.pack("<Q", 2**40),
    "a string that is not there": b"\x8d" + struct.pack("<Q", 2**40),
    "an array that is not there": b"\x96" + struct.pack("<Q", 2**40),
    "a frame that is not there": b"\x95" + struct.pack("<Q", 2**40) + b"N",
    "tuples in each other as a key": b"}N" + b"\x85" * 300_000 + b"Ns",
    "lists in each other": b"]" * 300_000 + b"a" * 299_999,
    "many sets": b"(" + b"\x8f" * 2_000_000 + b"l",
    "iterators in each other": called("builtins", "list", deep(20_000)),
    "a path of many parts": called("pathlib", "PosixPath", b"X" + struct.pack("<I", 100_000) + b"a/" * 50_000),
    "an array of zeros": called("builtins", "bytearray", number(10**11)),
    "a persistent object": b"NQ",
    "two of one": b"N2",
}
for name, opcodes in PICKLES.items():
    CASES[f"{name} in .metadata"] = raw(START + opcodes + b".")


# sizes ----------------------------------------------------------------------------------------------------------------


def each(metadata: Any, change: Callable[[Any, Any], None]) -> None:
    for index, info in metadata.storage_data.items():
        change(index, info)


def of_size(metadata: Any, size: int) -> None:
    """Says that a tensor is so large."""
    (described,) = (one for one in metadata.state_dict_metadata.values() if isinstance(one, TensorStorageMetadata))
    described.size = described.chunks[0].sizes = torch.Size([size])


def in_record(metadata: Any, **values: int) -> None:
    """Replaces numbers of the first record of the shard."""
    name = next(name for name in metadata.lightning["files"] if name != metadata.lightning["meta"])
    described = metadata.lightning["files"][name]
    first, *others = metadata_file.records_of(described)
    described["records"] = [tuple(record) for record in (first._replace(**values), *others)]


def of_file(metadata: Any, **values: Any) -> None:
    for described in metadata.lightning["files"].values():
        described.update(values)


def overlapping(metadata: Any) -> None:
    (info,) = {id(info): info for index, info in metadata.storage_data.items() if index.fqn == "model.w"}.values()
    for at in range(5_000):
        name = f"more{at}"
        metadata.state_dict_metadata[name] = metadata.state_dict_metadata["model.w"]
        place = type(info)(info.relative_path, info.offset + at % 7, info.length)
        metadata.storage_data[MetadataIndex(name, torch.Size([0]))] = place


def nested(metadata: Any, path: Any) -> None:
    metadata.planner_data["model.w"] = path


for save in (stock, ours):
    for what, change in {
        "a tensor of 4 TiB": partial(of_size, size=2**40),
        "a tensor of 4 GiB": partial(of_size, size=2**30),
        "a negative size": partial(of_size, size=-3),
        "a negative offset": partial(each, change=lambda _, info: setattr(info, "offset", -5)),
        "a record without an end": partial(each, change=lambda _, info: setattr(info, "length", 2**61)),
        "a record beyond the file": partial(each, change=lambda _, info: setattr(info, "offset", 2**50)),
        "an offset that is no number": partial(each, change=lambda _, info: setattr(info, "offset", "0")),
        "a list of a thousand million places": partial(nested, path=("model", 10**9)),
        "a path of a hundred thousand steps": partial(nested, path=("model",) * 100_000),
        "a path that is none": partial(nested, path=7),
        "records on top of each other": overlapping,
    }.items():
        CASES[f"{what} ({save.__name__})"] = changed(change, save)
for what, change in {
    "data of 4 EiB": partial(in_record, nbytes=2**62, crcs=b""),
    "data before the file": partial(in_record, offset=-(2**40), length=2**41),
    "no checksums": partial(in_record, crcs=b"\0"),
    "records that are none": partial(of_file, records=[(0, 1)]),
    "records of another kind": partial(of_file, records=("Q", b"\xff" * 32 * 1000)),
    "a size that is none": partial(of_file, size=None),
    "a size of 4 EiB": partial(of_file, size=2**61),
}.items():
    CASES[f"a file of ours with {what}"] = changed(change, ours)


# archives -------------------------------------------------------------------------------------------------------------


def pickled(function: str, *arguments: bytes) -> bytes:
    module, _, name = function.rpartition(".")
    return f"c{module}\n{name}\n".encode() + b"(" + b"".join(arguments) + b"tR"


def storage(numel: int, key: str = "0") -> bytes:
    text = b"X" + struct.pack("<I", len(key)) + key.encode()
    return b"(X\7\0\0\0storagectorch\nFloatStorage\n" + text + b"X\3\0\0\0cpu" + number(numel) + b"tQ"


def tensor(numel: int = 3, offset: int = 0, size: bytes = b"K\3\x85", stride: bytes = b"K\1\x85") -> bytes:
    hooks = b"ccollections\nOrderedDict\n)R"
    return pickled("torch._utils._rebuild_tensor_v2", storage(numel), number(offset), size, stride, b"\x89", hooks)


def archive(opcodes: bytes, *more: tuple[str, bytes], compressed: bool = False) -> bytes:
    file = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(file, "w", method) as opened:
        records = [("data.pkl", b"\x80\2" + opcodes + b"."), ("byteorder", b"little"), ("data/0", b"\0" * 12)]
        for name, data in [*records, ("version", b"3\n"), *more]:
            opened.writestr(f"x/{name}", data)
    return file.getvalue()


def said_to_have(size: int) -> bytes:
    """A record of 12 bytes that is said to have so many more."""
    content = bytearray(archive(tensor(size // 4)))
    entry = content.index(b"PK\1\2", content.rindex(b"x/byteorder"))
    content[entry + 20 : entry + 28] = struct.pack("<II", size, size)
    return bytes(content)


LARGE = number(2**40) + b"\x85"
WIDE = pickled(
    "torch._utils._rebuild_device_tensor_from_cpu_tensor",
    tensor(3, 0, number(2**34) + b"\x85", b"K\0\x85"),
    b"ctorch\nfloat64\n",
    b"X\3\0\0\0cpu",
    b"\x89",
)
ARCHIVES: dict[str, bytes] = {
    "a tensor of 4 TiB": archive(tensor(3, 0, LARGE)),
    "a tensor whose storage is said to have 4 TiB": archive(tensor(2**40, 0, LARGE)),
    "a tensor whose storage is said to have 4 GiB": archive(tensor(2**30, 0, number(2**30) + b"\x85")),
    "strides beyond the record": archive(tensor(3, 0, b"K\3\x85", number(2**40) + b"\x85")),
    "negative strides": archive(tensor(3, 2, b"K\3\x85", b"J\xff\xff\xff\xff\x85")),
    "an offset beyond the record": archive(tensor(3, 2**40)),
    "a negative offset": archive(tensor(3, -(2**20))),
    "a record that is missing": archive(pickled("torch._utils._rebuild_tensor_v2", storage(3, "7"), b"K\0))\x89N")),
    "an array of 100 GB": archive(pickled("builtins.bytearray", number(10**11))),
    "a tensor that becomes one of 128 GiB": archive(WIDE),
    "tuples in each other as a key": archive(b"}N" + b"\x85" * 300_000 + b"Ns"),
    "bytes again and again": archive(
        b"]X"
        + struct.pack("<I", 10**5)
        + b"a" * 10**5
        + b"q\1X\6\0\0\0latin1q\2"
        + b"00]"
        + b"c_codecs\nencode\nh\1h\2\x86Ra" * 100_000
    ),
    "a place of the memo that is far away": archive(b"Nr\xff\xff\xff\xff" + storage(2**40)),
    "a record that inflates": archive(tensor(), ("data/1", bytes(2**28)), compressed=True),
    "a record of 100 GB that is not there": said_to_have(0xFFFFFFF0),
    "a record twice": archive(tensor(), ("data/0", b"\1" * 12)),
    "no pickle": archive(tensor()).replace(b"data.pkl", b"data.pkx"),
    "bytes in front of it": b"PK\3\4" + archive(tensor()),
}


def overlapping_records() -> bytes:
    content = bytearray(archive(tensor(), ("data/1", b"\1" * 12)))
    first, second = (content.index(f"x/data/{key}".encode(), content.index(b"PK\1\2")) for key in (0, 1))
    content[second - 4 : second] = content[first - 4 : first]
    return bytes(content)


ARCHIVES["records on top of each other"] = overlapping_records()
for name, content in ARCHIVES.items():
    CASES[f"{name} in a file"] = partial(Path.write_bytes, data=content)


def with_record(content: bytes) -> Case:
    """A sharded checkpoint of torch's, with another archive for its tensor."""

    def make(folder: Path) -> None:
        metadata = stock(folder)
        for index, info in metadata.storage_data.items():
            if index.fqn == "model.w":
                info.relative_path, info.offset, info.length = "other.distcp", 0, len(content)
        (folder / "other.distcp").write_bytes(content)
        write(folder, metadata)

    return make


def with_meta(content: bytes) -> Case:
    def make(folder: Path) -> None:
        stock(folder)
        (folder / "meta.pt").write_bytes(content)

    return make


for name in ("a tensor whose storage is said to have 4 TiB", "an array of 100 GB", "a record that inflates"):
    CASES[f"{name} in a shard"] = with_record(ARCHIVES[name])
    CASES[f"{name} in meta.pt"] = with_meta(ARCHIVES[name])


# what users do --------------------------------------------------------------------------------------------------------


def load_all(path: Path) -> None:
    if path.is_file():
        load.load_file(path)
        return
    into = {"model": {"w": torch.zeros(3), "note": []}}
    found = checkpoint_place.find_checkpoint(path)
    checkpoint_load.load_shards(into, found)
    checkpoint_load.load_metadata(found)


def verify_all(path: Path) -> None:
    problems = verify.verify(locate(path)).problems
    if problems:
        raise OSError(problems[0])


def consolidate_all(path: Path) -> None:
    if path.is_dir():
        consolidate.consolidate(locate(path), locate(path.with_name("consolidated")))
    else:
        full_state.load_whole(path)


ACTS: dict[str, Callable[[Path], Any]] = {
    "verify": verify_all,
    "load": load_all,
    "consolidate": consolidate_all,
    "look": discover.why_incomplete,
}


def status(name: str) -> float:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def outcome(act: Callable[[Path], Any], path: Path) -> list[str]:
    try:
        act(path)
    except Exception as error:
        return [type(error).__name__, str(error)[:2000]]
    return []


def report(path: Path) -> dict[str, Any]:
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before, start = status("VmRSS"), time.process_time()  # which others on the machine add nothing to
    outcomes = {name: outcome(act, path) for name, act in ACTS.items()}
    return {"outcomes": outcomes, "seconds": time.process_time() - start, "mib": status("VmHWM") - before}


def main(folder: Path, names: list[str]) -> None:
    os.chdir(folder)
    for number, name in enumerate(names):
        path = folder / f"{number}.ckpt"
        CASES[name](path)
        sys.stdout.flush()
        child = os.fork()
        if not child:
            resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))
            resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
            signal.alarm(120)  # if it waits
            print(json.dumps({"case": name, **report(path)}), flush=True)
            os._exit(0)
        _, ended = os.waitpid(child, 0)
        if ended:
            print(json.dumps({"case": name, "died": os.waitstatus_to_exitcode(ended)}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(CASES))
