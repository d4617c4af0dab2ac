"""Measures saves in the background from a device, as training sees them: stalls, steps beside them, and memory."""

import os
import threading
import time
from collections.abc import Callable, Iterator

import torch
from memory import Watcher
from object_server import serving
from staging import MIB, Sizes, seconds, summary

from lightning.fabric.plugins.io.async_io import AsyncCheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.storage.background.saver import states_of


def saves(device: str, sizes: Sizes, watcher: Watcher) -> dict[str, float]:
    """Returns what saves to a server on this machine do to training; it discards what it gets."""
    with serving() as server:
        os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}", "AWS_DEFAULT_REGION": "us-east-1"}
        os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
        # imports a client, and connects
        TorchCheckpointIO().save_checkpoint({"x": torch.ones(1000)}, "s3://bucket/warm-up.ckpt")
        return Training(device, sizes).measure(watcher)


class Training:
    """A model that is trained with Adam, and saved to ``s3://bucket``."""

    def __init__(self, device: str, sizes: Sizes) -> None:
        self._device, self._sizes = device, sizes
        layers = [torch.nn.Linear(sizes.width, sizes.width, device=device) for _ in range(sizes.layers)]
        self._model = torch.nn.Sequential(*layers)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=1e-6)
        self._batch = torch.randn(sizes.batch, sizes.width, device=device)
        self._io = AsyncCheckpointIO()

    def measure(self, watcher: Watcher) -> dict[str, float]:
        idle = list(self._steps(self._sizes.steps + 10))[10:]
        tensors = [*self._model.parameters(), *states_of([self._optimizer])]
        on_device, before = self._device_memory(), watcher.level()
        with watcher.watching() as peak:
            self._io.saver.warm(tensors, strategy=None)
            warming = list(self._steps_while(lambda: is_running("warm-checkpoint-memory")))
            first = self._save("first")
            uploading = list(self._steps_while(self._is_uploading))
            later = []
            for number in range(self._sizes.saves):
                later.append(self._save(f"later-{number}"))
                uploading += self._steps_while(self._is_uploading)
        self._io.drain()
        again = list(self._steps(self._sizes.steps))
        return {
            "saved_gib": sum(tensor.nbytes for tensor in tensors) / 2**30,
            **summary("step_seconds", idle),
            **summary("step_while_memory_is_warmed_seconds", warming),
            **summary("step_during_upload_seconds", uploading),
            **summary("step_again_seconds", again),
            "first_save_seconds": first,
            **summary("save_seconds", later),
            "save_host_memory_mib": (peak.bytes - before) / MIB,
            "kept_host_memory_mib": (watcher.level() - before) / MIB,
            "save_device_memory_mib": (self._device_memory() - on_device) / MIB,
        }

    def _save(self, name: str) -> float:
        """Seconds for which a save keeps the thread that trains."""
        state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
        start = time.perf_counter()
        self._io.save_checkpoint(state, f"s3://bucket/{name}.ckpt")
        return time.perf_counter() - start

    def _is_uploading(self) -> bool:
        return not self._io.saver._queue.has_room

    def _steps(self, count: int) -> Iterator[float]:
        for _ in range(count):
            yield seconds(self._device, self._step)

    def _steps_while(self, goes_on: Callable[[], bool]) -> Iterator[float]:
        """One step at least."""
        yield seconds(self._device, self._step)
        while goes_on():
            yield seconds(self._device, self._step)

    def _step(self) -> None:
        self._optimizer.zero_grad()
        self._model(self._batch).square().mean().backward()
        self._optimizer.step()

    def _device_memory(self) -> int:
        """The most that tensors have taken; a peak of steps, which saves may not exceed."""
        return torch.cuda.max_memory_allocated() if self._device == "cuda" else 0


def is_running(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())
