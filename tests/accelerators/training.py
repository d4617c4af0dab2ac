"""The promises of a Trainer that trains on a device and saves in the background."""

import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning.fabric.storage.background.host_memory import HostMemory
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from tests.accelerators.device import Device
from tests.accelerators.staging import until
from tests.pytorch.background_runs import HeldIO

STEPS = 6


class Model(LightningModule):
    """Has tied weights, buffers that change in the forward pass, and an optimizer with a state."""

    def __init__(self, **loader_options: Any) -> None:
        super().__init__()
        self.loader_options = loader_options
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 64)
        )

    def training_step(self, batch: Tensor) -> Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.layers[3].weight = self.layers[0].weight  # not before: some devices get a copy of each
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        batch = torch.rand(4, 64, generator=generator)  # the same in each step, wherever an epoch is resumed
        return torch.utils.data.DataLoader(batch.repeat(STEPS, 1), batch_size=4, **self.loader_options)


class Saved(Callback):
    """Keeps each state as it was when it was saved, on the host."""

    def __init__(self) -> None:
        self.states: dict[int, dict[str, Any]] = {}

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        optimizer = trainer.optimizers[0].state_dict()
        moments = {f"{at}.{name}": value for at, of in optimizer["state"].items() for name, value in of.items()}
        tensors = {**checkpoint["state_dict"], **moments}
        self.states[trainer.global_step] = {name: value.detach().cpu().clone() for name, value in tensors.items()}


class PluginContract:
    def test_what_is_made_for_a_save_is_let_go_when_it_is_copied_though_the_save_waits_for_others(
        self, tmp_path: Path, device: Device
    ) -> None:
        held = HeldIO()
        io = AsyncCheckpointIO(held, max_in_flight=2)
        references = []
        for number in range(2):
            average = device.numbered(start=number)
            references.append(weakref.ref(average.untyped_storage()))
            io.save_checkpoint({"average": average}, tmp_path / f"{number}.ckpt")
            del average
        until(lambda: not any(reference() for reference in references))
        assert not any(tmp_path.iterdir())
        held.release()
        io.drain()
        for number in range(2):
            loaded = torch.load(tmp_path / f"{number}.ckpt", map_location="cpu")
            assert torch.equal(loaded["average"], device.numbered(start=number).cpu())


class TrainingContract:
    def fit(self, device: Device, folder: Path, *callbacks: Callback, **options: Any) -> Model:
        plugin = options.pop("plugin", None) or AsyncCheckpointIO(max_in_flight=options.pop("max_in_flight", 1))
        path = options.pop("ckpt_path", None)
        torch.manual_seed(0)
        model = Model(**options.pop("loader", {}))
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = Trainer(
            plugins=[plugin], default_root_dir=folder, max_epochs=1, callbacks=list(callbacks), **quiet,
            **device.trainer_options(), **options,
        )  # fmt: skip
        trainer.fit(model, ckpt_path=path)
        return model

    def every_step(self, folder: Path) -> ModelCheckpoint:
        return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)

    @pytest.mark.parametrize("max_in_flight", [1, 2])
    def test_each_checkpoint_is_the_state_of_its_step_and_training_as_without_them(
        self, max_in_flight: int, tmp_path: Path, device: Device
    ) -> None:
        saved = Saved()
        model = self.fit(device, tmp_path, self.every_step(tmp_path), saved, max_in_flight=max_in_flight)
        plain = self.fit(device, tmp_path / "plain", enable_checkpointing=False)
        final = {name: value.cpu() for name, value in model.state_dict().items()}
        assert all(torch.equal(final[name], value.cpu()) for name, value in plain.state_dict().items())
        assert sorted(saved.states) == list(range(1, STEPS + 1))
        for step, expected in saved.states.items():
            loaded = torch.load(tmp_path / f"step={step}.ckpt", weights_only=False, map_location="cpu")
            moments = loaded["optimizer_states"][0]["state"].items()
            tensors = {**loaded["state_dict"], **{f"{at}.{name}": v for at, of in moments for name, v in of.items()}}
            assert set(tensors) == set(expected)
            assert all(torch.equal(tensors[name], value) for name, value in expected.items()), step
            weights = [loaded["state_dict"][f"layers.{layer}.weight"] for layer in (0, 3)]
            assert weights[0].data_ptr() == weights[1].data_ptr()

    def test_a_save_returns_while_its_copies_are_held_up_and_has_the_state_of_its_step(
        self, tmp_path: Path, device: Device
    ) -> None:
        path, states = tmp_path / "held.ckpt", []

        class Save(Callback):
            def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
                if trainer.global_step == 3:
                    states.append({name: value.cpu() for name, value in module.state_dict().items()})
                    device.hold_copies()
                    trainer.save_checkpoint(path)
                    for parameter in module.parameters():
                        parameter.data.mul_(2)
                    assert not path.exists()
                    device.let_go()

        self.fit(device, tmp_path, Save(), enable_checkpointing=False)
        loaded = torch.load(path, weights_only=False, map_location="cpu")["state_dict"]
        assert all(torch.equal(loaded[name], value) for name, value in states[0].items())

    def test_training_that_is_resumed_ends_as_one_that_was_not_interrupted(
        self, tmp_path: Path, device: Device
    ) -> None:
        forked = {"num_workers": 1, "pin_memory": True}  # while copies are in flight
        whole = self.fit(device, tmp_path, self.every_step(tmp_path), loader=forked)
        resumed = self.fit(device, tmp_path / "again", ckpt_path=tmp_path / "step=3.ckpt")
        for name, value in whole.state_dict().items():
            assert torch.equal(resumed.state_dict()[name].cpu(), value.cpu()), name

    def test_steps_do_not_wait_for_memory_that_is_warmed(
        self, tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        init, enough, kept_waiting = HostMemory.__init__, threading.Event(), []

        def late(memory: HostMemory, *arguments: Any) -> None:
            kept_waiting.append(not enough.wait(20))
            init(memory, *arguments)

        class Steps(Callback):
            def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
                if trainer.global_step == STEPS - 1:
                    device.synchronize()
                    enough.set()

        monkeypatch.setattr(HostMemory, "__init__", late)
        last = ModelCheckpoint(tmp_path, filename="last", every_n_train_steps=STEPS)
        model = self.fit(device, tmp_path, Steps(), last)
        assert set(kept_waiting) == {False}
        loaded = torch.load(tmp_path / "last.ckpt", weights_only=False, map_location="cpu")["state_dict"]
        assert all(torch.equal(loaded[name], value.cpu()) for name, value in model.state_dict().items())
