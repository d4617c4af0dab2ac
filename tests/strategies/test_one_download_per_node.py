"""Two real ranks load from S3 once, in the module's fixture; the tests look at what they saw and asked for."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning.fabric.plugins import TorchCheckpointIO
from tests.servers import Bucket, Server
from tests.strategies import node_worker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="memory is shared between processes on Linux only"),
]


class Outcome:
    """What both ranks saw, what the store was asked for, and what it costs a single process."""

    def __init__(self, bucket: Bucket, folder: Path) -> None:
        self.bucket = bucket
        model = node_worker.Model()
        trainer = node_worker.trainer(1, 1, default_root_dir=folder)
        trainer.fit(model)
        trainer.save_checkpoint(folder / "local")
        self.saved = node_worker.checksum(model.state_dict())
        node_worker.trainer(2, 1, max_steps=3, default_root_dir=folder).fit(model, ckpt_path=folder / "local")
        self.a_step_later = node_worker.checksum(model.state_dict())
        keys = ("resumed", "loaded", "loaded_again", "refused", "mixed", "out_of_reach", "two_machines", "alone")
        for key in (*keys, "plugin", "single", "folder/meta.pt"):
            bucket.put(key, (folder / "local").read_bytes())
        odd = {"odd": Fraction(1, 3)}  # which weights_only does not let through
        for key, content in {"raw": model.layer.state_dict(), "odd": odd, "over_http": odd}.items():
            torch.save(content, folder / key)
            bucket.put(key, (folder / key).read_bytes())
        bucket.server.client.put_object_acl(Bucket=bucket.name, Key="over_http", ACL="public-read")
        self.shm = sorted(os.listdir("/dev/shm"))
        with bucket.refusing(lambda method, path: 403 if "refused" in path else None):
            self.ranks = self.run(folder)
        TorchCheckpointIO().load_checkpoint(f"{bucket.url}/single")
        self.single = self.downloads("single")

    def run(self, folder: Path) -> list[dict[str, Any]]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", node_worker.__name__, self.bucket.url, str(folder)]
        options = {"cwd": Path(__file__).parents[2], "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        environments = [{**os.environ, **place, "LOCAL_RANK": str(rank)} for rank in (0, 1)]
        ranks = [subprocess.Popen(command, env=environment, text=True, **options) for environment in environments]
        try:
            output = [rank.communicate(timeout=90)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(output)
        return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]

    def downloads(self, key: str) -> int:
        wanted = f"/{self.bucket.name}/{key}"
        return sum(method == "GET" and path.partition("?")[0] == wanted for method, path in self.bucket.requests)

    def seen(self, what: str) -> Any:
        """What both ranks saw alike."""
        first, second = (rank[what] for rank in self.ranks)
        assert first == second
        return first


@pytest.fixture(scope="module")
def outcome(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield Outcome(Bucket(server), tmp_path_factory.mktemp("node"))


def test_ranks_resume_from_one_download_through_a_plugin_that_wraps_the_default_one(outcome: Outcome) -> None:
    epoch, steps, weights = outcome.seen("resumed")
    assert (epoch, steps) == (2, 3)
    assert weights == pytest.approx(outcome.a_step_later, rel=1e-6)
    assert weights != pytest.approx(outcome.saved, rel=1e-6)
    assert outcome.downloads("resumed") == outcome.single > 0


def test_ranks_load_one_download_into_memory_of_their_own(outcome: Outcome) -> None:
    assert outcome.seen("loaded") == outcome.seen("loaded again") == outcome.saved
    assert outcome.downloads("loaded") == outcome.downloads("loaded_again") == outcome.single
    assert outcome.seen("left after a load") == outcome.seen("left") == []
    new = set(os.listdir("/dev/shm")).difference(outcome.shm)
    assert [name for name in new if not name.startswith(("sem.", "torch"))] == []  # which are of tests beside this one


def test_weights_only_is_heeded(outcome: Outcome) -> None:
    assert outcome.seen("weights only") == "UnpicklingError"
    assert outcome.seen("not weights only") == ["odd"]
    assert outcome.seen("over http") == ["odd"]  # for such URLs, Lightning's default is not to
    assert outcome.downloads("over_http") == 2  # one of them asks whether the server knows ranges


def test_all_ranks_raise_what_kept_the_file_from_being_downloaded(outcome: Outcome) -> None:
    url = outcome.bucket.url
    for what, kind, reason in [
        ("missing", "FileNotFoundError", f"Could not download {url}/missing for the ranks of this node: "),
        ("refused", "PermissionError", f"Could not download {url}/refused for the ranks of this node: "),
        ("folder", "IsADirectoryError", "is a sharded checkpoint: load it with FSDP or ModelParallel"),
    ]:
        raised, message = outcome.seen(what)
        assert raised == kind
        assert reason in message
    assert max(rank["seconds until all were told"] for rank in outcome.ranks) < 5


def test_ranks_that_cannot_share_download_for_themselves(outcome: Outcome) -> None:
    for case in ("mixed", "out of reach", "two machines"):
        assert outcome.seen(case) == outcome.saved
    assert outcome.downloads("mixed") == outcome.single  # by rank 1, while rank 0 was given a local path
    assert outcome.downloads("out_of_reach") == outcome.downloads("two_machines") == 2 * outcome.single


def test_one_rank_may_load_alone(outcome: Outcome) -> None:
    alone, by_the_strategy, resumed = outcome.ranks[1]["alone"]
    assert alone == by_the_strategy == outcome.saved
    assert resumed != outcome.saved
    assert outcome.downloads("alone") == 3 * outcome.single


def test_a_plugin_that_loads_in_its_own_way_is_left_to_it(outcome: Outcome) -> None:
    assert outcome.seen("loaded by a plugin") == [outcome.saved, f"{outcome.bucket.url}/plugin"]
    assert outcome.downloads("plugin") == outcome.single
