import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from build_backend.distribution import LIGHTNING
from build_backend.upstream import read_pin
from tests.servers import Bucket
from tests.servers.proxy import proxy_before
from tests.strategies.trainings import Ranks, Runs, differences


def assert_continued(straight: Ranks, resumed: Ranks) -> None:
    for one, other in zip(straight, resumed, strict=True):
        assert (one.pop("batches_seen"), other.pop("batches_seen")) == (8, 4)  # the first epoch was not done again
        assert one["parameters"]
        assert one["optimizer"]
        assert differences(one, other) == []


# Both import names see every strategy, both kinds of state and both front ends; so do saves in the background.
CASES = [
    ("fabric", "fsdp", "sharded", "lightning", False),
    ("fabric", "fsdp", "full", "pytorch_lightning", True),
    ("fabric", "model_parallel", "sharded", "pytorch_lightning", True),
    ("fabric", "model_parallel", "full", "lightning", True),
    ("trainer", "fsdp", "sharded", "pytorch_lightning", True),
    ("trainer", "fsdp", "full", "lightning", True),
    ("trainer", "model_parallel", "sharded", "lightning", True),
    ("trainer", "model_parallel", "full", "pytorch_lightning", False),
]


@pytest.mark.slow
@pytest.mark.parametrize(("api", "strategy", "kind", "package", "in_background"), CASES)
def test_a_run_resumed_from_s3_ends_bit_for_bit_like_one_that_was_not_stopped(
    runs: Runs, bucket: Bucket, api: str, strategy: str, kind: str, package: str, in_background: bool
) -> None:
    case = {"api": api, "strategy": strategy, "kind": kind, "package": package, "url": f"{bucket.url}/run", "epochs": 2}
    straight = runs.train(**case, in_background=in_background)
    files = [key for key in bucket.names() if key.startswith("run/epoch=0.ckpt")]
    if kind == "sharded":
        shards = [name for name in files if name.endswith(".distcp")]
        assert [name.split("_", 3)[3] for name in shards] == ["0_0.distcp", "1_0.distcp", "meta.distcp"]
        assert sorted(files) == sorted([*shards, "run/epoch=0.ckpt/.metadata", "run/epoch=0.ckpt/meta.pt"])
    else:
        assert files == ["run/epoch=0.ckpt"]
    assert_continued(straight, runs.train(**case, resume=f"{bucket.url}/run/epoch=0.ckpt"))


@pytest.mark.slow
@pytest.mark.parametrize("in_background", [False, True])
def test_rank_zero_alone_copies_the_shards_of_all_ranks_for_the_link_to_the_last_checkpoint(
    runs: Runs, bucket: Bucket, in_background: bool
) -> None:
    case = {"api": "trainer", "strategy": "model_parallel", "kind": "sharded", "package": "lightning"}
    case |= {"url": f"{bucket.url}/run", "epochs": 2, "save_last": "link"}
    target = bucket.server.proxy.target
    with proxy_before(target) as first, proxy_before(target) as second:
        endpoints = [{"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.server_port}"} for proxy in (first, second)]
        straight = runs.train(endpoints, **case, in_background=in_background)
        written = [
            sorted(path.partition("run/last.ckpt/")[2] for method, path in proxy.requests if method == "PUT")
            for proxy in (first, second)
        ]
    last, linked = (
        {name.rpartition("/")[2]: bucket.get(name) for name in bucket.names(f"run/{folder}.ckpt/")}
        for folder in ("last", "epoch=1")
    )
    assert last == linked
    assert len(last) == 5
    assert set(last) < set(written[0])
    assert set(written[1]) == {""}  # its own shards

    resumed = runs.train(**case, resume=f"{bucket.url}/run/last.ckpt")
    for one, other in zip(straight, resumed, strict=True):
        assert (one["batches_seen"], other["batches_seen"]) == (8, 0)
        for key in ("parameters", "optimizer", "groups", "schedulers", "counters"):
            assert one[key]
            assert differences(one[key], other[key]) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_local_folders_go_on_working(runs: Runs, tmp_path: Path, kind: str) -> None:
    url = str(tmp_path / "checkpoints")
    case = {"api": "trainer", "strategy": "fsdp", "kind": kind, "package": "lightning", "url": url, "epochs": 2}
    straight = runs.launch(**case)
    rest = torch.load(f"{url}/epoch=0.ckpt" + ("/meta.pt" if kind == "sharded" else ""))
    assert rest["pytorch-lightning_version"] == read_pin(LIGHTNING).version  # without our suffix, for stock to load it
    assert_continued(straight, runs.launch(**case, resume=f"{url}/epoch=0.ckpt"))


@pytest.mark.slow
def test_full_and_sharded_checkpoints_replace_each_other_at_one_path(runs: Runs, bucket: Bucket) -> None:
    case = {"api": "fabric", "strategy": "fsdp", "package": "lightning", "url": bucket.url}
    runs.train(**case, kind="full", epochs=1)
    runs.train(**case, kind="sharded", epochs=1)
    assert "epoch=0.ckpt" not in bucket.names()
    assert "epoch=0.ckpt/meta.pt" in bucket.names()
    straight = runs.train(**case, kind="full", epochs=2)
    assert bucket.names() == ["epoch=0.ckpt", "epoch=1.ckpt"]
    assert_continued(straight, runs.train(**case, kind="sharded", epochs=2, resume=f"{bucket.url}/epoch=0.ckpt"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "refused", "reason"),
    [
        (
            "sharded",
            "_1_0.distcp",
            "Could not save the sharded checkpoint {}: rank 1: PermissionError: Could not write",
        ),
        (
            "sharded",
            "_meta.distcp",
            "Could not save the sharded checkpoint {}: rank 0: PermissionError: Could not write",
        ),
        ("full", "epoch%3D0.ckpt", "Could not write {}"),
    ],
)
def test_a_refused_file_fails_the_save_on_every_rank_and_leaves_the_old_checkpoint(
    runs: Runs, bucket: Bucket, kind: str, refused: str, reason: str
) -> None:
    case = {"api": "fabric", "strategy": "fsdp", "kind": kind, "package": "lightning", "url": bucket.url}
    straight = runs.train(**case, epochs=2)
    before = bucket.names()

    with bucket.refusing(lambda method, path: 403 if method == "PUT" and refused in path else None):
        folder, result = runs.start({}, **case, epochs=1)
    assert result.returncode != 0
    told = reason.format(f"{bucket.url}/epoch=0.ckpt")
    for rank in (0, 1):
        lines = [line for line in result.stderr.splitlines() if line.startswith(f"[rank{rank}]: ")]
        assert told in lines[-1], rank
        assert [line for line in lines if "AccessDenied" in line] == lines[-1:]  # the store's word, once
        assert lines[-1].count("AccessDenied") == 1
        assert [line for line in lines if "Traceback" in line] == lines[:1]
    assert os.listdir(folder) == ["case.json"]
    assert set(before) <= set(bucket.names())
    assert_continued(straight, runs.train(**case, epochs=2, resume=f"{bucket.url}/epoch=0.ckpt"))
    if refused == "_1_0.distcp":
        assert len([name for name in bucket.names() if name.startswith("epoch=1.ckpt/")]) == 5  # dead shards have gone


@pytest.mark.slow
def test_stock_pytorch_and_stock_lightning_read_our_shards_and_we_read_theirs(
    runs: Runs, bucket: Bucket, tmp_path: Path, pristine: Callable[[str], Path]
) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    local = tmp_path / "stock"
    case = {"api": "fabric", "strategy": "model_parallel", "kind": "sharded", "package": "lightning", "epochs": 2}
    straight = runs.launch({"PYTHONPATH": str(pristine("lightning"))}, **case, url=str(local))
    for path in (local / "epoch=0.ckpt").iterdir():
        bucket.put(f"epoch=0.ckpt/{path.name}", path.read_bytes())
    resumed = runs.train(**case, url=bucket.url, resume=f"{bucket.url}/epoch=0.ckpt")
    assert_continued(straight, resumed)

    copy = tmp_path / "copy.ckpt"
    copy.mkdir()
    for key in bucket.names():
        if key.startswith("epoch=1.ckpt/"):
            (copy / key.rpartition("/")[2]).write_bytes(bucket.get(key))
    dcp_to_torch_save(copy, tmp_path / "full.pt")
    ours = torch.load(tmp_path / "full.pt")
    whole = {name: torch.cat([rank["parameters"][name] for rank in resumed]) for name in resumed[0]["parameters"]}
    assert differences(dict(ours["model"]), whole) == []
    stock = runs.launch({"PYTHONPATH": str(pristine("lightning"))}, **case, url=str(tmp_path / "x"), resume=str(copy))
    for one, other in zip(resumed, stock, strict=True):
        assert other.pop("batches_seen") == 0
        assert differences(one, other) == []


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "model_parallel"])
def test_stock_lightning_does_none_of_this(
    runs: Runs, bucket: Bucket, pristine: Callable[[str], Path], strategy: str
) -> None:
    """So the tests above would fail on it: FSDP refuses the CPU, and model parallelism fills a local folder."""
    case = {
        "api": "trainer",
        "strategy": strategy,
        "kind": "sharded",
        "package": "lightning",
        "url": bucket.url,
        "epochs": 1,
    }
    folder, result = runs.start({"PYTHONPATH": str(pristine("lightning"))}, **case)
    assert bucket.names() == []
    if strategy == "fsdp":
        assert result.returncode != 0
        assert "FSDP needs a non-CPU accelerator device" in result.stderr
    else:
        assert "s3:" in os.listdir(folder)
