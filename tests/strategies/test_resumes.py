"""Whether a run that is saved and resumed ends with the same state as one that is not interrupted, bit for bit."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import lightning.pytorch as pl
from lightning.fabric.storage.sharded.describable import describable
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.loops import loader_states
from tests.servers import Bucket
from tests.strategies.forks import Forks
from tests.strategies.resumes import CASES

COLUMNS = (
    ("ddp", "full"),
    ("fsdp", "full"),
    ("fsdp", "sharded"),
    ("model_parallel", "full"),
    ("model_parallel", "sharded"),
)
#: For each case and mode of a rank, what is not as it should be.
Told = dict[str, list[str]]


def modes_of(strategy: str, kind: str, name: str, slow: bool) -> list[str]:
    """How the state is saved: in the background only if that may differ, or with the slow tests.

    With these are all full states of distributed models, too, of which there are other tests.
    """
    quick = ["sync", "background"] if CASES[name].differs_in_background else ["sync"]
    if strategy != "ddp" and kind == "full":
        quick = []
    return [mode for mode in ("sync", "background") if (mode in quick) is not slow]


class Results:
    """Runs all cases of a column in one pair of processes, when the first is asked for."""

    def __init__(self, forks: Forks, root: Path) -> None:
        self._forks = forks
        self._root = root
        self.of_column = cache(self._of_column)

    def _of_column(self, strategy: str, kind: str, slow: bool) -> list[Told]:
        folder = self._root / f"{strategy}-{kind}-{slow}"
        folder.mkdir()
        cases = {
            name: modes_of(strategy, kind, name, slow) for name, case in CASES.items() if strategy not in case.without
        }
        return results_of(self._forks, strategy, kind, cases, folder)


def results_of(
    forks: Forks,
    strategy: str,
    kind: str,
    cases: dict[str, list[str]],
    root: Path,
    place: str = "",
    environment: Mapping[str, str] | None = None,
) -> list[Told]:
    """What both ranks say of some cases, each with its modes, that are saved at ``place`` or else in ``root``."""
    job = {"task": "resume", "strategy": strategy, "kind": kind, "cases": cases, "longest_s": 240}
    job |= {"root": str(root), "place": place or str(root), "environments": [dict(environment or {})] * 2}
    return [outcome["results"] for outcome in forks.run(job)]


@pytest.fixture(scope="module")
def results(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(forks, tmp_path_factory.mktemp("resumes"))


@pytest.mark.parametrize(
    ("strategy", "kind", "name", "mode", "slow"),
    [
        pytest.param(
            *column, name, mode, slow, id="-".join((*column, name, mode)), marks=[pytest.mark.slow] if slow else []
        )
        for slow in (False, True)
        for column in COLUMNS
        for name, case in CASES.items()
        if column[0] not in case.without
        for mode in modes_of(*column, name, slow)
    ],
)
def test_a_resumed_run_ends_as_one_that_was_not_interrupted_or_the_save_names_what_it_cannot_keep(
    results: Results, strategy: str, kind: str, name: str, mode: str, slow: bool
) -> None:
    told = [of_rank[f"{name}-{mode}"] for of_rank in results.of_column(strategy, kind, slow)]
    refusal = CASES[name].refused.get(strategy)
    if refusal is None:
        assert told == [[], []]
    else:
        for (only,) in told:  # and there is nothing where it would have been
            assert only.startswith("save: ValueError: ")
            assert refusal in only


@pytest.mark.parametrize(("strategy", "then"), [("fsdp", "model_parallel"), ("model_parallel", "fsdp")])
def test_a_sharded_checkpoint_is_resumed_with_the_other_strategy(
    forks: Forks, tmp_path: Path, strategy: str, then: str
) -> None:
    job = {
        "task": "resume",
        "strategy": strategy,
        "kind": "sharded",
        "how": "continued",
        "then": then,
        "environments": [{}, {}],
    }
    for outcome in forks.run({**job, "root": str(tmp_path), "place": str(tmp_path / "run")}):
        straight, resumed = outcome["losses"]
        assert resumed == pytest.approx(straight, rel=1e-6)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_that_fails_alone_does_not_wait_for_the_others_to_save(
    forks: Forks, tmp_path: Path, strategy: str
) -> None:
    job = {"task": "resume", "strategy": strategy, "kind": "sharded", "how": "alone", "environments": [{}, {}]}
    waiting, failed = forks.run({**job, "place": str(tmp_path / "run")})
    assert failed["fit"] == "RuntimeError: boom"
    assert max(waiting["seconds"], failed["seconds"]) < 20, "which is less than a collective call may take"
    assert not list(tmp_path.glob("run/*"))


def test_the_same_on_an_object_store(forks: Forks, tmp_path: Path, bucket: Bucket) -> None:
    cases = {"Late": ["background"], "BufferedSparse": ["sync"], "Loader": ["sync"]}
    environment = bucket.server.environment
    told = results_of(forks, "model_parallel", "sharded", cases, tmp_path, f"{bucket.url}/run", environment)
    assert told == [{f"{name}-{mode}": [] for name, (mode,) in cases.items()}] * 2


def test_fsdp_says_how_to_have_a_checkpoint_after_an_error_in_a_step_where_it_cannot_gather_a_full_state(
    forks: Forks, tmp_path: Path
) -> None:
    job = {"task": "resume", "strategy": "fsdp", "how": "alone", "all": True, "environments": [{}, {}]}
    for outcome in forks.run({**job, "kind": "full", "place": str(tmp_path / "full")}):
        assert outcome["fit"] == "RuntimeError: boom"
        assert 'With `FSDPStrategy(state_dict_type="sharded")`' in outcome["shown"]
    for outcome in forks.run({**job, "kind": "sharded", "place": str(tmp_path / "sharded")}):
        assert outcome["fit"] == "RuntimeError: boom"
    assert [path.name for path in tmp_path.glob("*/*")] == ["epoch=0-step=1.ckpt"]


@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("strategy", ["fsdp", "model_parallel"])
def test_fabric_restores_optimizers_that_have_no_state_of_some_parameters_or_of_none(
    forks: Forks, tmp_path: Path, strategy: str, kind: str
) -> None:
    job = {"task": "stateless", "strategy": strategy, "kind": kind, "path": str(tmp_path / "x.ckpt")}
    for outcome in forks.run({**job, "environments": [{}, {}]}):
        assert outcome["error"] is None
        assert outcome["different"] == []


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_fabric_refuses_a_part_of_a_tensor_beside_the_model(forks: Forks, tmp_path: Path, kind: str) -> None:
    job = {"task": "save", "strategy": "model_parallel", "kind": kind, "path": str(tmp_path / "x.ckpt"), "value": 1.0}
    for outcome in forks.run({**job, "part": True, "environments": [{}, {}]}):
        assert "'part' is a distributed tensor" in outcome["error"]
    assert list(tmp_path.iterdir()) == []


def test_a_part_of_a_distributed_tensor_is_not_saved_within_an_object() -> None:
    class Part(torch.Tensor):
        """As torch recognizes one."""

        def __create_write_items__(self) -> None: ...

    part = torch.ones(2).as_subclass(Part)
    assert describable({"optimizer": {"state": {"w": {"both": [part, part]}}}})
    for within in ((part, part), {0: part}, [part, {}]):
        with pytest.raises(ValueError, match=r"'optimizer\.state\.w\.both.* is a distributed tensor in a "):
            describable({"optimizer": {"state": {"w": {"both": within}}}})


def test_loaders_go_on_from_rank_zeros_place_with_a_warning_if_there_are_more_or_fewer_ranks() -> None:
    state = {"combined_loader": [{"at": 1}], "combined_loaders_of_ranks": [[{"at": 1}], [{"at": 2}]]}
    with pytest.warns(UserWarning, match="of 2 ranks, and these are 1"):
        assert loader_states.of_this_rank(state) == [{"at": 1}]
    assert loader_states.of_this_rank({"combined_loader": [{"at": 3}]}) == [{"at": 3}]
    assert loader_states.of_this_rank({}) == []


class Finetuned(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        return self.head(self.backbone(batch)).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)

    def train_dataloader(self) -> torch.utils.data.DataLoader[torch.Tensor]:
        return torch.utils.data.DataLoader(torch.linspace(-1, 1, 32).reshape(8, 4), batch_size=4)


def test_what_finetuning_has_unfrozen_is_trained_after_a_resume(tmp_path: Path) -> None:
    def train(epochs: int, resume: Path | None = None) -> tuple[pl.Trainer, Finetuned]:
        model = Finetuned()
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, max_epochs=epochs, logger=False, enable_checkpointing=False,
            callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=1, train_bn=False)], default_root_dir=tmp_path,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(model, ckpt_path=resume)
        return trainer, model

    train(2)[0].save_checkpoint(tmp_path / "x.ckpt")
    _, straight = train(4)
    _, resumed = train(4, tmp_path / "x.ckpt")
    for (name, one), other in zip(straight.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
