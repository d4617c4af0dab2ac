"""What is wrong with a checkpoint is found without loading it, and told."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner

from lightning.fabric import cli
from lightning.fabric.storage.archives.save import save_file
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.sharded import metadata_file
from lightning.fabric.storage.sharded.checksums import records_of
from lightning.fabric.storage.strategies import checkpoint_load, checkpoint_save
from lightning.fabric.storage.tools import file_checks, verify
from lightning.fabric.utilities import verify_checkpoint
from tests.servers import Bucket
from tests.storage.shards import along, make

MIB = 2**20
STATE = {
    "model": {"large": torch.arange(3.0 * MIB / 4), "small": torch.ones(7), "empty": torch.empty(0)},
    "optimizer": {"lr": 0.1, "names": ["large", "small"]},
}


def save(place: str | Path) -> None:
    checkpoint_save.save_sharded(STATE, {"epoch": 3}, place)


def save_stock(folder: Path) -> None:
    dcp.save(STATE, checkpoint_id=folder, no_dist=True)
    torch.save({"epoch": 3}, folder / "meta.pt")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[[str | Path], tuple[int, list[str], str]]:
    """Verifies, and gives the exit code, the lines that were printed, and what was told beside them."""

    def run(place: str | Path) -> tuple[int, list[str], str]:
        capsys.readouterr()
        code = verify_checkpoint.run(str(place))
        told = capsys.readouterr()
        return code, told.out.splitlines(), told.err

    return run


Run = Callable[[str | Path], tuple[int, list[str], str]]


def flip(path: Path, *places: int) -> None:
    content = bytearray(path.read_bytes())
    for place in places:
        content[place] ^= 1
    path.write_bytes(content)


def shard_of(folder: Path) -> Path:
    return next(found for found in folder.glob("*.distcp") if "meta" not in found.name)


def size(*paths: Path) -> int:
    return sum(path.stat().st_size for path in paths)


@pytest.fixture(params=["requests as usual", "many requests"])
def requests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "many requests":
        monkeypatch.setattr(file_checks, "REQUEST", MIB)


@pytest.mark.usefixtures("requests")
def test_a_sound_checkpoint_is_complete_and_right(tmp_path: Path, run: Run) -> None:
    save(tmp_path / "x.ckpt")
    nbytes = size(*(tmp_path / "x.ckpt").iterdir())
    assert run(tmp_path / "x.ckpt")[:2] == (0, [f"complete, 4 files, {nbytes} bytes, all checksums right"])


@pytest.mark.usefixtures("requests")
def test_a_sound_checkpoint_of_stock_lightning_is_said_to_have_no_checksums(tmp_path: Path, run: Run) -> None:
    save_stock(tmp_path / "x.ckpt")
    code, lines, _ = run(tmp_path / "x.ckpt")
    nbytes = size(*(tmp_path / "x.ckpt").iterdir())
    verdict = "saved without checksums; those of the archives in it (CRC-32) are right"
    assert (code, lines) == (0, [f"complete, 3 files, {nbytes} bytes, {verdict}"])


def test_a_sound_file_is_complete_and_right(tmp_path: Path, run: Run) -> None:
    save_file(STATE, tmp_path / "x.ckpt")
    line = f"complete, 1 file, {size(tmp_path / 'x.ckpt')} bytes, all checksums right"
    assert run(tmp_path / "x.ckpt")[:2] == (0, [line])


def test_a_file_that_torch_saved_without_checksums_is_said_to_have_none(tmp_path: Path, run: Run) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(STATE, tmp_path / "x.ckpt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert run(tmp_path / "x.ckpt")[1][0].endswith("bytes, saved without checksums")


@pytest.mark.usefixtures("requests")
def test_every_damaged_byte_of_a_shard_is_found_and_belongs_to_a_tensor(tmp_path: Path, run: Run) -> None:
    save(tmp_path / "x.ckpt")
    shard = shard_of(tmp_path / "x.ckpt")
    records = {}
    for index, info in metadata_file.read_metadata(locate(tmp_path / "x.ckpt"))[0].storage_data.items():
        records[index.fqn] = info
    assert set(records) == {"model.large", "model.small", "model.empty", "optimizer.lr", "optimizer.names"}
    for name, info in records.items():
        for place in (info.offset, info.offset + info.length // 2, info.offset + info.length - 1):
            flip(shard, place)
            code, lines, _ = run(tmp_path / "x.ckpt")
            assert code == 1
            found = re.fullmatch(
                rf"{shard}: bytes (\d+) to (\d+) of '{name}' are damaged: their checksum is wrong", lines[0]
            )
            assert found, lines
            assert int(found[1]) <= place < int(found[2]) <= int(found[1]) + MIB
            assert re.fullmatch(r"1 problem, 4 files, \d+ bytes: load another checkpoint", lines[1])
            flip(shard, place)
    assert run(tmp_path / "x.ckpt")[0] == 0


def test_damage_that_goes_on_is_one_line_and_other_damage_is_another(tmp_path: Path, run: Run) -> None:
    save(tmp_path / "x.ckpt")
    shard, meta = shard_of(tmp_path / "x.ckpt"), next((tmp_path / "x.ckpt").glob("*_meta.distcp"))
    info = next(
        i
        for n, i in metadata_file.read_metadata(locate(tmp_path / "x.ckpt"))[0].storage_data.items()
        if n.fqn == "model.large"
    )
    flip(shard, info.offset + 1000, info.offset + 1000 + MIB)
    flip(meta, 100)
    code, lines, _ = run(tmp_path / "x.ckpt")
    assert code == 1
    assert len(lines) == 3
    assert re.match(rf"{shard}: bytes \d+ to \d+ of 'model.large' are damaged", lines[0])
    assert re.match(rf"{meta}: bytes 0 to \d+ of 'what is neither model nor optimizer' are damaged", lines[1])
    assert lines[2].startswith("2 problems, 4 files")


@pytest.mark.usefixtures("requests")
def test_damage_in_a_shard_of_stock_lightning_is_found(tmp_path: Path, run: Run) -> None:
    save_stock(tmp_path / "x.ckpt")
    shard = shard_of(tmp_path / "x.ckpt")
    pieces = {
        "model.large": torch.arange(99.0, 120.0).numpy().tobytes(),
        "model.small": torch.ones(7).numpy().tobytes(),
    }
    pieces["optimizer.lr"] = b"G\x3f\xb9\x99"  # of the pickled number
    for name, piece in pieces.items():
        at = shard.read_bytes().index(piece)
        flip(shard, at)
        code, lines, _ = run(tmp_path / "x.ckpt")
        assert code == 1
        found = re.match(rf"{shard}: bytes (\d+) to (\d+) of '{name}' are damaged: Bad CRC-32", lines[0])
        assert found, lines
        assert int(found[1]) < at < int(found[2])
        flip(shard, at)
    assert run(tmp_path / "x.ckpt")[0] == 0
    meta = tmp_path / "x.ckpt" / "meta.pt"
    flip(meta, meta.read_bytes().index(b"epoch"))
    code, lines, _ = run(tmp_path / "x.ckpt")
    assert code == 1
    assert re.match(rf"{meta}: bytes \d+ to \d+ of 'meta/data.pkl' are damaged: Bad CRC-32", lines[0])


def test_a_shard_of_stock_lightning_that_was_cut_off_is_told_with_the_tensors_that_it_lacks(
    tmp_path: Path, run: Run
) -> None:
    save_stock(tmp_path / "x.ckpt")
    shard = shard_of(tmp_path / "x.ckpt")
    last = max(
        metadata_file.read_metadata(locate(tmp_path / "x.ckpt"))[0].storage_data.items(),
        key=lambda item: item[1].offset,
    )
    shard.write_bytes(shard.read_bytes()[:-10])
    code, lines, _ = run(tmp_path / "x.ckpt")
    assert code == 1
    assert re.match(rf"{shard}: bytes \d+ to \d+ of '{last[0].fqn}' are missing", lines[0])
    assert len(lines) == 2


@pytest.mark.parametrize("broken", ["short", "missing", "uncommitted", "commit"])
def test_an_incomplete_checkpoint_is_told_with_what_is_missing(tmp_path: Path, run: Run, broken: str) -> None:
    folder = tmp_path / "x.ckpt"
    save(folder)
    shard, metadata = shard_of(folder), folder / ".metadata"
    if broken == "short":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif broken == "commit":
        flip(metadata, 100)
    else:
        (shard if broken == "missing" else metadata).unlink()
    code, lines, _ = run(folder)
    reason = {
        "short": f"incomplete: of another size than saved: {shard.name}",
        "missing": f"incomplete: {shard.name} is missing",
        "uncommitted": r"incomplete: \.metadata is missing",
        "commit": rf"{metadata} is damaged: its checksum is wrong",
    }[broken]
    assert code == 1
    assert re.search(reason, lines[0]), lines
    assert lines[1].startswith("1 problem")


@pytest.mark.parametrize("damage", ["a byte", "an earlier save", "missing"])
def test_what_only_stock_lightning_reads_is_checked_too(tmp_path: Path, run: Run, damage: str) -> None:
    folder = tmp_path / "x.ckpt"
    save(folder)
    meta = folder / "meta.pt"
    if damage == "a byte":
        flip(meta, 100)
    elif damage == "missing":
        meta.unlink()
    else:
        checkpoint_save.save_sharded(STATE, {"epoch": 2}, tmp_path / "y.ckpt")
        meta.write_bytes((tmp_path / "y.ckpt" / "meta.pt").read_bytes())
    code, lines, _ = run(folder)
    assert code == 1
    assert len(lines) == 2
    assert str(meta) in lines[0]
    assert lines[0].endswith("(stock Lightning reads this file, this library does not)")
    assert checkpoint_load.load_metadata(folder) == {"epoch": 3}


@pytest.mark.parametrize("lacking", ["record", "checksums"])
def test_bytes_without_a_checksum_are_a_problem(tmp_path: Path, run: Run, lacking: str) -> None:
    metadata = make(tmp_path / "x.ckpt", {"a": torch.ones(3), "b": torch.ones(3)}, along(0, 1), ranks=1)
    ours: dict[str, Any] = metadata.lightning  # type: ignore[attr-defined]
    ours["meta"] = None
    described = ours["files"]["__0_0.distcp"]
    records = described["records"] = [tuple(record) for record in records_of(described)]
    gone = records.pop(0)
    if lacking == "checksums":
        records.insert(0, (*gone[:4], b""))
    metadata_file.write_metadata(locate(tmp_path / "x.ckpt"), metadata)
    code, lines, _ = run(tmp_path / "x.ckpt")
    assert code == 1
    assert lines[0].endswith(f"bytes 0 to {gone[1]} of 'a' have no checksum")
    assert len(lines) == 2


def test_a_damaged_file_is_told_with_the_tensor(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "x.ckpt"
    torch.save(STATE, path)
    at = path.read_bytes().index(torch.ones(7).numpy().tobytes())
    flip(path, at)
    code, lines, _ = run(path)
    assert code == 1
    found = re.match(rf"{path}: bytes (\d+) to (\d+) of 'model.small \(x/data/1\)' are damaged: Bad CRC-32", lines[0])
    assert found, lines
    assert int(found[1]) < at < int(found[2])


@pytest.mark.parametrize("format", ["truncated", "legacy"])
def test_a_file_that_is_no_whole_archive_is_a_problem(tmp_path: Path, run: Run, format: str) -> None:
    path = tmp_path / "x.ckpt"
    torch.save(STATE, path, _use_new_zipfile_serialization=format != "legacy")
    if format == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    code, lines, _ = run(path)
    assert code == 1
    assert re.match(rf"{path}: bytes 0 to {size(path)} are no archive of torch.save that is whole", lines[0])


@pytest.mark.parametrize(
    ("content", "kind"),
    [(b"", "it is empty"), (b"hello", "it begins with b'hello'"), (b"<html>", "it looks like an HTML")],
)
def test_a_file_of_another_kind_is_said_to_be_none(content: bytes, kind: str, bucket: Bucket, run: Run) -> None:
    bucket.put("x.ckpt", content)
    code, lines, _ = run(f"{bucket.url}/x.ckpt")
    assert code == 1
    assert lines[0].startswith(f"{bucket.url}/x.ckpt is no checkpoint: {kind}")


class Bomb:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('a pickle has run')",)


def test_no_code_of_a_file_is_run(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "x.ckpt"
    torch.save({"bomb": Bomb(), "w": torch.ones(7)}, path)
    flip(path, path.read_bytes().index(torch.ones(7).numpy().tobytes()))
    code, lines, _ = run(path)
    assert code == 1
    assert "of 'w (x/data/0)'" in lines[0]


def test_checkpoints_in_a_store_are_verified_there(bucket: Bucket, run: Run) -> None:
    save(f"{bucket.url}/x.ckpt")
    save_file(STATE, f"{bucket.url}/full.ckpt")
    assert run(f"{bucket.url}/x.ckpt")[1][0].startswith("complete, 4 files")
    assert run(f"{bucket.url}/full.ckpt")[1][0].startswith("complete, 1 file")
    shard = next(name for name in bucket.names() if name.endswith("_0_0.distcp"))
    content = bytearray(bucket.get(shard))
    content[len(content) // 2] ^= 1
    bucket.put(shard, bytes(content))
    code, lines, _ = run(f"{bucket.url}/x.ckpt")
    assert code == 1
    assert lines[0].startswith(f"{bucket.url}/{shard}: bytes ")


def test_whoever_may_read_but_not_list_can_verify(bucket: Bucket, run: Run) -> None:
    save(f"{bucket.url}/x.ckpt")
    names = bucket.names()
    with bucket.refusing(lambda method, path: None if path.partition("/")[2].partition("/")[2] in names else 403):
        assert run(f"{bucket.url}/x.ckpt")[0] == 0
    shard = next(name for name in names if name.endswith("_0_0.distcp"))
    bucket.put(shard, bucket.get(shard)[:-1])
    with bucket.refusing(lambda method, path: None if path.partition("/")[2].partition("/")[2] in names else 403):
        code, lines, _ = run(f"{bucket.url}/x.ckpt")
    assert code == 1
    assert "are missing" in lines[0]


def test_what_cannot_be_verified_is_told_in_one_line(bucket: Bucket, tmp_path: Path, run: Run) -> None:
    (tmp_path / "folder").mkdir()
    save(f"{bucket.url}/x.ckpt")
    for place, reason in {
        tmp_path / "missing.ckpt": (
            f"There is nothing at {tmp_path}/missing.ckpt. Correct the path: there is no 'missing.ckpt' in {tmp_path}."
        ),
        tmp_path / "folder": f"There is no checkpoint in the folder {tmp_path}/folder",
        f"{bucket.url}/missing.ckpt": (
            f"There is nothing at {bucket.url}/missing.ckpt. Correct the URL: upper and lower case and every slash"
            " count in the names of a store."
        ),
        "nope://x.ckpt": "ValueError: There is no way to nope://x.ckpt: fsspec knows no protocol 'nope': use .*",
    }.items():
        assert run(place)[:2] == (2, [])
        assert re.search(rf"^{reason}$", run(place)[2], re.M), run(place)
    with bucket.refusing(lambda method, path: 403):
        code, lines, told = run(f"{bucket.url}/x.ckpt")
    assert (code, lines) == (2, [])
    assert f"Could not read {bucket.url}/x.ckpt/.metadata" in told.splitlines()[-1]


def test_a_store_that_is_out_of_reach_is_told_of_with_the_endpoint(
    bucket: Bucket, run: Run, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    code, lines, told = run(f"{bucket.url}/x.ckpt")
    assert (code, lines) == (2, [])
    assert f"Could not look at {bucket.url}/x.ckpt: " in told
    assert "Is the server the right one? See AWS_ENDPOINT_URL" in told


def test_all_checkpoints_of_a_folder_are_verified_with_a_line_for_each(tmp_path: Path, run: Run) -> None:
    save(tmp_path / "shards.ckpt")
    save_file(STATE, tmp_path / "version_0" / "checkpoints" / "file.ckpt")
    save(tmp_path / "version_0" / "of fabric")
    (tmp_path / "version_0" / "metrics.csv").write_text("not a checkpoint")
    (tmp_path / ".0123456789abcdef.tmp").mkdir()  # a save that is going on
    (tmp_path / ".0123456789abcdef.tmp" / "__0_0.distcp").write_text("")
    found = {
        tmp_path / "shards.ckpt": 4,
        tmp_path / "version_0" / "checkpoints" / "file.ckpt": 1,
        tmp_path / "version_0" / "of fabric": 4,
    }
    lines = [rf"{place}: complete, {files} files?, \d+ bytes, all checksums right" for place, files in found.items()]
    code, told, _ = run(tmp_path)
    assert code == 0
    assert_lines(told, [*lines, "3 checkpoints, all complete"])
    flip(shard_of(tmp_path / "shards.ckpt"), 50)
    (tmp_path / "version_0" / "of fabric" / ".metadata").unlink()
    code, told, _ = run(tmp_path)
    assert code == 1
    wrong = [rf"{place}: 1 problem, \d+ files?, \d+ bytes: load another checkpoint" for place in found]
    damaged = rf"{tmp_path}/shards\.ckpt/.*: bytes .* are damaged.*"
    incomplete = r".* incomplete: \.metadata is missing.*"
    assert_lines(told, [damaged, wrong[0], lines[1], incomplete, wrong[2], "3 checkpoints: 2 with problems"])


def assert_lines(lines: list[str], patterns: list[str]) -> None:
    assert len(lines) == len(patterns), lines
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(pattern, line), (line, pattern)


def test_what_links_lead_to_counts_once_and_links_to_nothing_are_problems(tmp_path: Path, run: Run) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    save(folder / "epoch=1.ckpt")
    save_file(STATE, outside / "epoch=0.ckpt")
    (folder / "best.ckpt").symlink_to("epoch=1.ckpt")
    (folder / "again").symlink_to(folder)
    (folder / "archive").symlink_to(outside)
    code, lines, _ = run(folder)
    assert code == 0
    checked = [line.partition(": ")[0] for line in lines]
    assert checked == [f"{folder}/archive/epoch=0.ckpt", f"{folder}/epoch=1.ckpt", "2 checkpoints, all complete"]
    (folder / "last.ckpt").symlink_to("epoch=2.ckpt")
    code, lines, _ = run(folder)
    assert (code, lines[-1]) == (1, "3 checkpoints: 1 with problems")
    assert lines[2] == f"{folder}/last.ckpt is a link to epoch=2.ckpt, where there is nothing"
    assert run(folder / "last.ckpt")[0] == 1


def test_what_cannot_be_checked_in_a_folder_does_not_end_the_rest(tmp_path: Path, run: Run, bucket: Bucket) -> None:
    (tmp_path / "a.ckpt" / "checkpoint").mkdir(parents=True)  # as DeepSpeed has them
    (tmp_path / "a.ckpt" / "latest").write_text("checkpoint")
    save_file(STATE, tmp_path / "b.ckpt")
    code, lines, _ = run(tmp_path)
    assert code == 2
    assert lines[0].startswith(f"{tmp_path}/a.ckpt: not checked: There is no checkpoint in the folder")
    assert lines[2] == "2 checkpoints: 1 not checked"
    (tmp_path / "c.ckpt").mkdir()  # which is all that a save had done
    code, lines, _ = run(tmp_path)
    assert code == 1
    assert lines[-1] == "3 checkpoints: 1 with problems, 1 not checked"

    for name in ("a", "b"):
        save_file(STATE, f"{bucket.url}/run/{name}.ckpt")
    with bucket.refusing(lambda method, path: 403 if "a.ckpt" in path else None):
        code, lines, _ = run(f"{bucket.url}/run")
    assert code == 2
    assert lines[0].startswith(f"{bucket.url}/run/a.ckpt: not checked: ")
    assert lines[1].startswith(f"{bucket.url}/run/b.ckpt: complete")


def test_all_checkpoints_of_a_folder_in_a_store_are_verified(bucket: Bucket, run: Run) -> None:
    save(f"{bucket.url}/run/x.ckpt")
    save_file(STATE, f"{bucket.url}/run/deep/y.ckpt")
    save(f"{bucket.url}/run/deep/y.ckpt")  # the folder is what would be loaded
    save_file(STATE, f"{bucket.url}/run/z.ckpt")
    bucket.put("run/z.ckpt/inner/w.ckpt", b"no checkpoint")
    code, lines, _ = run(f"{bucket.url}/run")
    assert code == 1
    told = [line for line in lines if "is no checkpoint" not in line]
    assert [line.partition(": ")[0].removeprefix(f"{bucket.url}/run/") for line in told] == [
        *("deep/y.ckpt", "x.ckpt", "z.ckpt", "z.ckpt/inner/w.ckpt", "4 checkpoints")
    ]
    assert told[0].partition(": ")[2].startswith("complete, 4 files")
    assert told[-1] == "4 checkpoints: 1 with problems"


@pytest.mark.parametrize("end", ["", "/"])
def test_all_checkpoints_of_a_bucket_are_verified(bucket: Bucket, run: Run, end: str) -> None:
    save(f"{bucket.url}/x.ckpt")
    save_file(STATE, f"{bucket.url}/run/y.ckpt")
    code, lines, _ = run(f"{bucket.url}{end}")
    assert code == 0
    assert lines[-1] == "2 checkpoints, all complete"


def test_a_checkpoint_that_is_removed_meanwhile_is_no_problem(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(STATE, tmp_path / "a.ckpt")
    save_file(STATE, tmp_path / "b.ckpt")
    find = verify.find_checkpoint

    def remove_another(place: Place) -> Any:
        (tmp_path / "b.ckpt").unlink(missing_ok=True)
        return find(place)

    monkeypatch.setattr(verify, "find_checkpoint", lambda p: remove_another(p) if p != locate(tmp_path) else find(p))
    code, lines, _ = run(tmp_path)
    assert code == 0
    assert lines[1:] == [f"{tmp_path}/b.ckpt: removed meanwhile", "1 checkpoint, all complete"]


def test_both_commands_return_the_exit_code(tmp_path: Path) -> None:
    save(tmp_path / "x.ckpt")
    good = CliRunner().invoke(cli._main, ["verify", str(tmp_path / "x.ckpt")])
    assert good.exit_code == 0
    assert good.output.splitlines()[-1].startswith("complete, 4 files")
    assert CliRunner().invoke(cli._main, ["verify", "--fast", str(tmp_path / "x.ckpt")]).exit_code == 2
    flip(shard_of(tmp_path / "x.ckpt"), 50)
    assert CliRunner().invoke(cli._main, ["verify", str(tmp_path / "x.ckpt")]).exit_code == 1
    command = [sys.executable, "-m", "lightning.fabric.utilities.verify_checkpoint", str(tmp_path / "x.ckpt")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert result.stdout.splitlines()[-1].startswith("1 problem")
    with pytest.raises(SystemExit, match="2"):
        verify_checkpoint.main([])


def test_without_click_the_command_says_what_to_install() -> None:
    script = """
from lightning_utilities.core.imports import RequirementCache
is_installed = RequirementCache.__bool__
RequirementCache.__bool__ = lambda self: self.requirement != "click" and is_installed(self)
from lightning.fabric.cli import _main
_main()
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert (result.returncode, result.stderr) == (1, "The command `fabric` needs click: pip install click\n")
