"""Whatever happens to a file of a checkpoint, verifying it either tells of that file, or it loads as it was."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lightning.fabric.storage.archives.load import load_file
from lightning.fabric.storage.archives.save import save_file
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.strategies import checkpoint_load, checkpoint_save
from lightning.fabric.storage.tools import verify
from tests.storage.states import assert_same

STATE: dict[str, Any] = {
    "model": {"a": torch.arange(700.0), "b": torch.ones(3, 5, dtype=torch.bfloat16), "empty": torch.empty(0)},
    "optimizer": {"lr": 0.1, "names": ["a", "b"]},
}
META = {"epoch": 3, "t": torch.arange(9)}
OF_KIND = 2_000


def _save_without_checksums(path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(STATE, path)
    finally:
        torch.serialization.set_crc32_options(True)


def _save_stock_shards(path: Path) -> None:
    dcp.save(STATE, checkpoint_id=path, no_dist=True)
    torch.save(META, path / "meta.pt")


KINDS: dict[str, Callable[[Path], None]] = {
    "file of torch": lambda path: torch.save(STATE, path),
    "file of ours": lambda path: save_file(STATE, path),
    "file without checksums": _save_without_checksums,
    "shards of torch": _save_stock_shards,
    "shards of ours": lambda path: checkpoint_save.save_sharded(STATE, META, path),
}


def flip(dice: random.Random, content: bytearray) -> None:
    for _ in range(dice.choice([1, 1, 1, 2, 8])):
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)


def cut(dice: random.Random, content: bytearray) -> None:
    start = dice.randrange(len(content))
    del content[start : dice.choice([len(content), start + dice.randrange(1, 100)])]


def insert(dice: random.Random, content: bytearray) -> None:
    at = dice.choice([0, len(content), dice.randrange(len(content))])
    content[at:at] = dice.choice([dice.randbytes(dice.randrange(1, 64)), bytes(dice.randrange(1, 64))])


def zero(dice: random.Random, content: bytearray) -> None:
    start = dice.randrange(len(content))
    stop = min(len(content), start + dice.randrange(1, 512))
    content[start:stop] = bytes(stop - start)


def overwrite(dice: random.Random, content: bytearray) -> None:
    start = dice.randrange(len(content))
    stop = min(len(content), start + dice.randrange(1, 16))
    content[start:stop] = dice.randbytes(stop - start)


def loads_as_it_was(path: Path) -> None:
    if path.is_file():
        assert_same(load_file(path), STATE)
        return
    into: dict[str, Any] = {
        "model": {name: torch.zeros_like(value) for name, value in STATE["model"].items()},
        "optimizer": {"lr": 0.0, "names": []},
    }
    checkpoint_load.load_shards(into, path)
    assert_same(into, STATE)
    assert_same(checkpoint_load.load_metadata(path), META)
    assert_same(torch.load(path / "meta.pt"), META)


def has_no_checksum(kind: str, path: Path) -> bool:
    return kind == "file without checksums" or (kind == "shards of torch" and path.name == ".metadata")


def check(kind: str, folder: Path, numbers: range) -> None:
    sound = folder / "sound"
    KINDS[kind](sound)
    loads_as_it_was(sound)
    names = sorted(path for path in sound.iterdir()) if sound.is_dir() else [sound]
    contents = [path.read_bytes() for path in names]
    for number in numbers:
        dice = random.Random(f"{kind} {number}")
        which = dice.randrange(len(names))
        damaged = bytearray(contents[which])
        dice.choice([flip, flip, cut, insert, zero, overwrite])(dice, damaged)
        if damaged == contents[which]:
            continue
        names[which].write_bytes(damaged)
        result = verify.verify(locate(sound))
        try:
            if result.problems:
                assert any(str(sound) in problem for problem in result.problems)
                # of this file, what it says is not there may be told instead
                if kind != "shards of torch" or names[which].name != ".metadata":
                    assert any(names[which].name in problem for problem in result.problems)
            elif has_no_checksum(kind, names[which]):
                assert result.verdict.startswith("saved without checksums")
            else:
                loads_as_it_was(sound)
        except Exception as error:
            raise AssertionError(f"damage {number} of {names[which].name} is not told") from error
        names[which].write_bytes(contents[which])
    loads_as_it_was(sound)


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_told_or_does_not_matter(kind: str, tmp_path: Path) -> None:
    check(kind, tmp_path, range(OF_KIND, OF_KIND + 100))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_much_damage_is_told_or_does_not_matter(kind: str, tmp_path: Path) -> None:
    check(kind, tmp_path, range(OF_KIND))
