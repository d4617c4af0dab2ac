"""The file that is made of a sharded checkpoint is the one that Lightning makes, wherever both are."""

import io
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch import nn

from lightning.fabric import cli
from lightning.fabric.storage.archives.load import load_file
from lightning.fabric.storage.archives.save import save_file
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.sharded import metadata_file
from lightning.fabric.storage.strategies import checkpoint_save
from lightning.fabric.storage.tools import consolidate
from lightning.fabric.utilities import consolidate_command
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint
from tests.servers import Bucket
from tests.storage.shards import along, make
from tests.storage.states import assert_same, serialized

SHARED = torch.arange(6.0)
META = {
    "epoch": 3,
    "callbacks": {"early": {"best": torch.tensor(0.5, dtype=torch.float64)}},
    "rng": (SHARED[:2], SHARED[2:]),
    "parameter": nn.Parameter(torch.ones(2)),
    "sparse": torch.eye(3).to_sparse(),
}


def state(model_key: str = "model") -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    model = {f"layer.{i}": torch.randn(300, 40, generator=generator) for i in range(6)}
    moments = {name: {"step": torch.tensor(4.0), "exp_avg": torch.ones(3)} for name in model}
    return {
        model_key: {**model, "half": torch.ones(7, dtype=torch.bfloat16), "scalar": torch.tensor(3, dtype=torch.int8)},
        "empty": torch.empty(0, 4),
        "optimizer_1": {"state": {}, "param_groups": [{"lr": 0.5, "params": []}]},
        "optimizer_0": {"state": moments, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": list(model)}]},
        "list": [torch.zeros(2), {"note": "x"}],
    }


def save(place: str | Path, state: dict[str, Any], meta: dict[str, Any] | None = None) -> Place:
    checkpoint_save.save_sharded(state, meta, place)
    return locate(place)


def command(folder: str | Path, output: str | Path | None = None) -> Namespace:
    arguments = consolidate_command.checked_arguments(str(folder), None if output is None else str(output))
    consolidate_command.run(arguments)
    return arguments


def stock(folder: Path) -> dict[str, Any]:
    """What Lightning's own function makes of a checkpoint, once it has been saved and loaded.

    It forgets the empty state of an optimizer, without which torch does not load the rest.
    """
    made = torch.load(io.BytesIO(serialized(_load_distributed_checkpoint(folder))), weights_only=False)
    return {**made, "optimizer_1": {"state": {}, **made["optimizer_1"]}}


@pytest.fixture(params=["at once", "in many batches"])
def batch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How much is read at a time; the tensors of :func:`state` are larger than the lesser size."""
    if request.param == "in many batches":
        monkeypatch.setattr(consolidate, "_BATCH", 10_000)


@pytest.mark.usefixtures("batch")
@pytest.mark.parametrize("writer", ["ours", "torch's"])
def test_the_file_is_the_one_of_stock_lightning(tmp_path: Path, writer: str) -> None:
    folder = tmp_path / "x.ckpt"
    if writer == "ours":
        save(folder, state(), META)
    else:
        dcp.save(state(), checkpoint_id=folder, no_dist=True)
        torch.save(META, folder / "meta.pt")
    arguments = command(folder)
    assert arguments == Namespace(
        checkpoint_folder=locate(folder), output_file=locate(tmp_path / "x.ckpt.consolidated")
    )
    made = torch.load(arguments.output_file.raw)  # weights_only
    expected = stock(folder)
    assert_same(made.pop("sparse").to_dense(), expected.pop("sparse").to_dense())
    parameter = made.pop("parameter")
    assert isinstance(parameter, nn.Parameter)
    assert torch.equal(parameter, expected.pop("parameter"))
    assert_same(made, expected)
    assert list(made) == ["model", "empty", "optimizer_1", "optimizer_0", "list", "epoch", "callbacks", "rng"]
    assert sorted(os.listdir(tmp_path)) == ["x.ckpt", "x.ckpt.consolidated"]


@pytest.mark.usefixtures("batch")
@pytest.mark.parametrize("dim", [0, 1])
def test_tensors_are_put_together_of_the_shards_of_all_ranks(tmp_path: Path, dim: int) -> None:
    folder, tensors = (
        tmp_path / "x.ckpt",
        {"long": torch.rand(700, 30), "short": torch.rand(3, 5), "one": torch.rand(())},
    )
    metadata = make(folder, tensors, along(dim, 4), {"note": "x"}, ranks=3)
    metadata.lightning["meta"] = None  # type: ignore[attr-defined]
    metadata_file.write_metadata(locate(folder), metadata)
    assert_same(torch.load(command(folder).output_file.raw), {**tensors, "note": "x"})


def test_tensors_that_share_memory_are_stored_once(tmp_path: Path) -> None:
    large = torch.rand(100_000)
    made = command(save(tmp_path / "x.ckpt", {"w": torch.ones(3)}, {"a": large, "b": large[10:]})).output_file.raw
    assert os.path.getsize(made) < 1.1 * large.nbytes
    loaded = torch.load(made)
    loaded["a"][10] = 7
    assert loaded["b"][0] == 7


TRAINERS = {"epoch": 3, "pytorch-lightning_version": "2.6.6"}


@pytest.mark.parametrize("model_key", ["model", "state_dict"])  # of FSDP, and of ModelParallel
def test_a_checkpoint_of_the_trainer_gets_the_names_that_it_loads(tmp_path: Path, model_key: str) -> None:
    eleven = {f"optimizer_{number}": {"state": {}, "param_groups": [{"lr": number}]} for number in reversed(range(11))}
    shards = {**state(model_key), **eleven}
    users = {"model": "mine", "optimizer_0": "mine", "optimizer_11": 7}  # of `on_save_checkpoint`
    made = torch.load(command(save(tmp_path / "x.ckpt", shards, {**TRAINERS, **users})).output_file.raw)
    assert set(made) == {"state_dict", "empty", "list", "optimizer_states", *TRAINERS, *users}
    assert_same(made["state_dict"], shards[model_key])
    assert_same(made["optimizer_states"], [shards[f"optimizer_{number}"] for number in range(11)])
    assert {name: made[name] for name in users} == users
    assert_same({**_format_checkpoint(shards), **TRAINERS, **users}, made)


def test_the_file_loads_into_optimizers_that_have_no_state(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.5)
    saved = {"model": {"w": torch.ones(2)}, "optimizer_0": optimizer.state_dict()}
    of_trainer = torch.load(command(save(tmp_path / "x.ckpt", saved, TRAINERS)).output_file.raw)["optimizer_states"][0]
    of_fabric = torch.load(command(save(tmp_path / "y.ckpt", saved)).output_file.raw)["optimizer_0"]
    for state_of_optimizer in (of_trainer, of_fabric):
        loading = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
        loading.load_state_dict(state_of_optimizer)
        assert loading.param_groups[0]["lr"] == 0.5


def test_a_checkpoint_of_the_trainer_without_optimizers_has_no_states_of_them(tmp_path: Path) -> None:
    made = torch.load(command(save(tmp_path / "x.ckpt", {"model": {"w": torch.ones(2)}}, TRAINERS)).output_file.raw)
    assert_same(made, {"state_dict": {"w": torch.ones(2)}, **TRAINERS})


MODULES = ["lightning.fabric.utilities.consolidate_checkpoint", "lightning.pytorch.utilities.consolidate_checkpoint"]


@pytest.mark.parametrize("meta", [TRAINERS, META], ids=["the Trainer's", "Fabric's"])
def test_all_commands_make_the_same_file_whoever_has_saved(
    tmp_path: Path, meta: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path / "x.ckpt", state(), meta).raw
    expected = Path(command(folder, tmp_path / "expected").output_file.raw).read_bytes()
    for module in MODULES:
        run_here(monkeypatch, module, folder, "--output_file", f"{tmp_path}/{module}")
        assert (tmp_path / module).read_bytes() == expected, module
    assert CliRunner().invoke(cli._main, ["consolidate", folder]).exit_code == 0
    assert Path(f"{folder}.consolidated").read_bytes() == expected


def test_the_help_of_all_commands_names_the_trainer_and_both_strategies(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [CliRunner().invoke(cli._main, ["consolidate", "--help"]).output]
    for module in MODULES:
        with pytest.raises(SystemExit, match="0"):
            run_here(monkeypatch, module, "--help")
        texts.append(capsys.readouterr().out)
    for text in texts:
        said = " ".join(text.split())
        assert "sharded checkpoint of FSDP or ModelParallel, which the Trainer or Fabric has saved" in said
        assert "load_from_checkpoint" in said
        assert "URL of any protocol" in said
        assert "only supports" not in said.lower()


def run_here(monkeypatch: pytest.MonkeyPatch, module: str, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    monkeypatch.delitem(sys.modules, module, raising=False)
    runpy.run_module(module, run_name="__main__")


def test_both_ends_can_be_in_a_store(bucket: Bucket, tmp_path: Path) -> None:
    url = f"{bucket.url}/run/x.ckpt"
    save(url, state(), {"epoch": 3})
    save(tmp_path / "x.ckpt", state(), {"epoch": 3})
    before = bucket.names()
    assert str(command(url).output_file.raw) == f"{url}.consolidated"
    assert sorted({*bucket.names()} - {*before}) == ["run/x.ckpt.consolidated"]
    assert_same(load_file(f"{url}.consolidated"), stock(tmp_path / "x.ckpt"))
    command(url, f"file://{tmp_path}/a/local.ckpt")
    command(tmp_path / "x.ckpt", f"{bucket.url}/remote.ckpt")
    assert (tmp_path / "a" / "local.ckpt").read_bytes() == bucket.get("remote.ckpt")


class Custom:
    pass


def test_state_that_is_not_safe_to_load_takes_a_word_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save(tmp_path / "x.ckpt", {"w": torch.ones(3)}, {"custom": Custom()})
    with pytest.raises(SystemExit, match="1"):
        command(folder)
    assert re.search(r"x\.ckpt has beside model .*set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1.*Custom", caplog.text, re.S)
    assert os.listdir(tmp_path) == ["x.ckpt"]
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    assert isinstance(torch.load(command(folder).output_file.raw)["custom"], Custom)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("broken", ["a shard is damaged", "a shard is missing", ".metadata is missing"])
def test_a_broken_checkpoint_is_refused_and_leaves_no_file(
    tmp_path: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "x.ckpt"
    save(folder, state(), {"epoch": 3})
    shard = next(folder.glob("*_0_0.distcp"))
    if broken == "a shard is damaged":
        flip(shard, shard.stat().st_size // 2)
    else:
        (shard if broken == "a shard is missing" else folder / ".metadata").unlink()
    with pytest.raises(SystemExit, match="1"):
        command(folder)
    reason = {
        "a shard is damaged": rf"{shard} is damaged: bytes \d+ to \d+",
        "a shard is missing": f"incomplete: {shard.name} is missing",
        ".metadata is missing": r"incomplete: \.metadata is missing",
    }[broken]
    assert re.search(reason, caplog.text)
    assert os.listdir(tmp_path) == ["x.ckpt"]


def test_a_tensor_of_which_a_part_is_not_there_is_no_garbage_but_an_error(tmp_path: Path) -> None:
    metadata = make(tmp_path / "x.ckpt", {"w": torch.rand(8, 2)}, along(0, 2))
    metadata.lightning["meta"] = None  # type: ignore[attr-defined]
    metadata.state_dict_metadata["w"].chunks.pop()
    metadata_file.write_metadata(locate(tmp_path / "x.ckpt"), metadata)
    with pytest.raises(OSError, match="do not tell where all of 'w' is"):
        consolidate.consolidate(locate(tmp_path / "x.ckpt"), locate(tmp_path / "y.ckpt"))
    assert os.listdir(tmp_path) == ["x.ckpt"]


@pytest.fixture(params=["local", "s3"])
def root(request: pytest.FixtureRequest, bucket: Bucket, tmp_path: Path) -> str:
    return bucket.url if request.param == "s3" else str(tmp_path)


def test_arguments_that_make_no_sense_are_refused(root: str, caplog: pytest.LogCaptureFixture) -> None:
    save(f"{root}/x.ckpt", {"w": torch.ones(3)}, {})
    save_file({"w": torch.ones(3)}, f"{root}/full.ckpt")
    save_file("mine", f"{root}/folder/notes.pt")

    def refusal(folder: str, output: str | None = None) -> str:
        caplog.clear()
        with pytest.raises(SystemExit, match="1"):
            consolidate_command.checked_arguments(folder, output)
        return caplog.text

    assert f"The checkpoint folder does not exist: {root}/missing.ckpt" in refusal(f"{root}/missing.ckpt")
    assert f"has to be a folder of shards, and there is a file: {root}/full.ckpt" in refusal(f"{root}/full.ckpt")
    assert f"no sharded checkpoint that Lightning has saved in the folder {root}/folder" in refusal(f"{root}/folder")
    taken = f"already: {root}/full.ckpt. Remove it, or choose another path with --output_file"
    assert taken in refusal(f"{root}/x.ckpt", f"{root}/full.ckpt")
    save_file("taken", f"{root}/x.ckpt.consolidated")
    assert f"already: {root}/x.ckpt.consolidated." in refusal(f"{root}/x.ckpt")
    assert "nope://bucket/x.ckpt: fsspec knows no protocol 'nope'" in refusal("nope://bucket/x.ckpt")


def test_a_bucket_that_is_missing_is_named(bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SystemExit, match="2"):
        consolidate_command.checked_arguments("s3://nope/x.ckpt", None, code_if_missing=2)
    assert "The checkpoint folder does not exist: s3://nope/x.ckpt. There is no bucket 'nope'" in caplog.text


def test_a_store_that_is_out_of_reach_is_one_line_that_names_the_endpoint(
    bucket: Bucket, caplog: pytest.LogCaptureFixture, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    with pytest.raises(SystemExit, match="1"):
        command(f"{bucket.url}/x.ckpt")
    told = caplog.records[-1].message
    assert f"Could not look at {bucket.url}/x.ckpt: " in told
    assert "Is the server the right one? See AWS_ENDPOINT_URL" in told


def test_a_store_that_refuses_is_one_line_and_no_traceback(bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    save(f"{bucket.url}/x.ckpt", {"w": torch.ones(3)}, {})
    with bucket.refusing(lambda method, path: 403), pytest.raises(SystemExit, match="1"):
        command(f"{bucket.url}/x.ckpt")
    assert f"Could not read {bucket.url}/x.ckpt/.metadata" in caplog.records[-1].message
    with bucket.refusing(lambda method, path: 403 if method == "PUT" else None), pytest.raises(SystemExit, match="1"):
        command(f"{bucket.url}/x.ckpt")
    assert f"Could not write {bucket.url}/x.ckpt.consolidated" in caplog.records[-1].message
    assert "x.ckpt.consolidated" not in bucket.names()


def test_the_fabric_command_takes_urls_and_files_that_are_not_there_yet(bucket: Bucket) -> None:
    save(f"{bucket.url}/x.ckpt", {"model": {"w": torch.ones(3)}}, {"epoch": 1})
    arguments = ["consolidate", f"{bucket.url}/x.ckpt", "--output_file", f"{bucket.url}/y.ckpt"]
    assert CliRunner().invoke(cli._main, arguments).exit_code == 0
    assert_same(load_file(f"{bucket.url}/y.ckpt"), {"model": {"w": torch.ones(3)}, "epoch": 1})
    assert CliRunner().invoke(cli._main, arguments).exit_code == 1  # it is there now
    missing = ["consolidate", f"{bucket.url}/missing"]
    assert CliRunner().invoke(cli._main, missing).exit_code == 2  # as of stock's command
    wrong = CliRunner().invoke(cli._main, ["consolidate", f"{bucket.url}/x.ckpt", "--out", "z"])
    assert wrong.exit_code == 2
    assert "--out" in wrong.output


def run_module(module: str, *arguments: str) -> Sequence[str]:
    return [sys.executable, "-m", module, *arguments]


def test_ctrl_c_in_the_middle_leaves_no_file(bucket: Bucket) -> None:
    save(f"{bucket.url}/x.ckpt", {f"w{i}": torch.ones(2**20) for i in range(20)}, {})
    before = bucket.names()
    is_in_the_middle, goes_on = threading.Event(), threading.Event()

    def hold(method: str, path: str) -> None:
        number = re.search(r"partNumber=(\d+)", path)
        if number is not None and number[1] != "1":
            is_in_the_middle.set()
            goes_on.wait(60)

    module = "lightning.fabric.utilities.consolidate_checkpoint"
    with (
        bucket.refusing(hold),
        subprocess.Popen(run_module(module, f"{bucket.url}/x.ckpt"), stderr=subprocess.PIPE, text=True) as process,
    ):
        try:
            assert is_in_the_middle.wait(60), process.poll()
            process.send_signal(signal.SIGINT)
            goes_on.set()
            process.communicate(timeout=60)
        finally:
            goes_on.set()
            process.kill()
    assert process.returncode == -signal.SIGINT
    assert bucket.names() == before
    assert bucket.unfinished_uploads() == []


MEASURE = """
import re, sys
from pathlib import Path
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.tools import consolidate, verify

def status(name):
    return int(re.search(rf"{name}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024

def measure(function, *arguments):
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before = status("VmRSS")
    result = function(*arguments)
    print(status("VmHWM") - before)
    return result

folder, output = map(locate, sys.argv[1:])
measure(consolidate.consolidate, folder, output)
assert not measure(verify.verify, folder).problems
assert not measure(verify.verify, output).problems
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is measured with /proc")
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    model = {f"w{i}": torch.rand(1024).expand(4096, 1024) for i in range(8)}  # 16 MiB each
    save(tmp_path / "x.ckpt", {**model, "large": torch.rand(1024).expand(49_152, 1024)}, {})
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "x.ckpt"), str(tmp_path / "y.ckpt")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert (tmp_path / "y.ckpt").stat().st_size > 320 * 2**20
    consolidated, folder, file = map(float, result.stdout.split())
    assert 64 < consolidated < 200  # MiB, for two batches of 64
    assert folder < 200
    assert file < 200
