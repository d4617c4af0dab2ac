"""Copies on a device's own stream, of which the calls are recorded; no device is needed for that."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lightning.fabric.storage import device_copies
from lightning.fabric.storage.device_copies import DeviceCopies, has_streams, pinned_memory

DEVICE = torch.device("xpu", 1)


class Module:
    """The parts of a device's module, whose streams have done nothing until they are let go."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.has_done_all = False
        self.fails_to_record = False
        made = self

        class Stream:
            def __init__(self, name: str = "copies", device: torch.device | None = None) -> None:
                self._name = name

            def wait_stream(self, other: "Stream") -> None:
                made.calls.append(f"{self._name} waits for {other._name}")

            def wait_event(self, event: str) -> None:
                made.calls.append(f"{self._name} waits for an event")

            def record_event(self) -> "Event":
                made.calls.append(f"event in {self._name}")
                if made.fails_to_record:
                    raise RuntimeError("cannot record")
                return Event()

            def query(self) -> bool:
                made.calls.append(f"query of {self._name}")
                return made.has_done_all

        class Event:
            def query(self) -> bool:
                made.calls.append("query of an event")
                return made.has_done_all

            def synchronize(self) -> None:
                made.calls.append("wait for an event")

        self.Stream = Stream

    def current_stream(self, device: torch.device) -> Any:
        return self.Stream("training")

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.calls.append(f"begin {stream._name}")
        yield
        self.calls.append(f"end {stream._name}")

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.calls.append(f"use {device}")
        yield


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Module]:
    made = Module()
    monkeypatch.setattr(torch, "xpu", made)
    device_copies._stream_of.cache_clear()
    yield made
    device_copies._stream_of.cache_clear()


def test_copies_are_made_on_their_own_stream_and_the_current_one_waits(module: Module) -> None:
    source, target = torch.ones(3), torch.zeros(3)
    DeviceCopies(DEVICE).begin([(target, source)])
    assert torch.equal(source, target)
    assert module.calls == [
        "copies waits for training",
        "use xpu:1",
        "begin copies",
        "end copies",
        "event in copies",
        "training waits for an event",
    ]


def test_sources_are_let_go_when_the_copies_have_arrived_and_not_before(module: Module) -> None:
    source = torch.ones(3)
    copies, reference = DeviceCopies(DEVICE, [source]), weakref.ref(source)
    copies.begin([(torch.zeros(3), source)])
    del source
    assert not copies.arrived()
    assert reference() is not None
    module.has_done_all = True
    assert copies.arrived()
    assert reference() is None
    calls = len(module.calls)
    assert copies.arrived()
    assert len(module.calls) == calls, "the device is not asked again"
    assert module.calls[-2:] == ["use xpu:1", "query of an event"]


def test_waiting_lets_the_sources_go(module: Module) -> None:
    source = torch.ones(3)
    copies, reference = DeviceCopies(DEVICE, [source]), weakref.ref(source)
    copies.begin([(torch.zeros(3), source)])
    del source
    copies.wait()
    assert reference() is None
    assert module.calls[-2:] == ["use xpu:1", "wait for an event"]


def test_copies_that_were_begun_before_an_error_are_in_flight(module: Module) -> None:
    def pairs() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield torch.zeros(3), torch.ones(3)
        raise MemoryError("no memory to make the next one contiguous")

    copies = DeviceCopies(DEVICE)
    with pytest.raises(MemoryError):
        copies.begin(pairs())
    assert "training waits for an event" in module.calls
    assert not copies.arrived()


def test_copies_behind_which_no_event_could_be_recorded_are_in_flight_as_long_as_the_stream_is_busy(
    module: Module,
) -> None:
    module.fails_to_record = True
    copies = DeviceCopies(DEVICE)
    with pytest.raises(RuntimeError, match="cannot record"):
        copies.begin([(torch.zeros(3), torch.ones(3))])
    assert not copies.arrived()
    module.has_done_all = True
    assert copies.arrived()
    assert module.calls[-1] == "query of copies"


@pytest.mark.parametrize("part", [None, "Stream", "stream", "current_stream", "device"])
def test_a_device_without_streams_copies_at_once(part: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as Apple's, whose module lacks some parts; part ``None`` stands for a device that has no module."""
    parts = {name: None for name in ("Stream", "stream", "current_stream", "device") if name != part}
    monkeypatch.setattr(torch, "mps", type("Module", (), parts) if part else None)
    device = torch.device("mps", 0)
    device_copies._stream_of.cache_clear()
    source, target = torch.ones(3), torch.zeros(3)
    copies = DeviceCopies(device, [source])
    assert copies.arrived()
    copies.begin([(target, source)])
    assert torch.equal(source, target)
    assert copies.arrived()
    copies.wait()
    assert pinned_memory(3, device) is None
    device_copies._stream_of.cache_clear()


def test_the_host_and_tensors_without_memory_have_no_streams() -> None:
    assert not has_streams(torch.device("cpu"))
    assert not has_streams(torch.device("meta"))


def test_memory_that_torch_cannot_pin_is_none(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no allocator of pinned memory")

    monkeypatch.setattr(torch, "empty", refuse)
    assert pinned_memory(3, DEVICE) is None
