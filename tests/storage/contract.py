"""What every store promises to a user of Lightning's checkpoints, as one class of tests.

A store of :mod:`tests.storage.stores` joins by a subclass, see :mod:`tests.storage.transport.test_contract`.
"""

import io
import pickle
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from lightning.fabric import Fabric
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.tools.copy import duplicate
from lightning.fabric.storage.transport import multipart, sink
from lightning.fabric.storage.transport.backends import fsspec as fsspec_transport
from lightning.fabric.storage.transport.open import open_writer
from lightning.fabric.utilities.load import _lazy_load, _materialize_tensors
from tests.storage.places import NAME, NAMES, Store, remember_listing
from tests.storage.states import Raising, assert_same, checkpoint, serialized, value_of
from tests.storage.stores import OnStore

MIB = 2**20
DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
#: What can happen in the middle of a save.
FAILURES = [pytest.param(ValueError("stop"), id="error"), pytest.param(KeyboardInterrupt(), id="interrupt")]
#: What a store says of a file that it does not have as it should be.
UNREADABLE = (RuntimeError, EOFError, OSError, ValueError, pickle.UnpicklingError)


def write(url: str, content: bytes, error: BaseException | None = None) -> None:
    """Writes a file as a save does; if there is an error, it is raised before the end."""
    with open_writer(locate(url)) as file:
        file.write(content)
        if error is not None:
            raise error


def lower_limits(patch: pytest.MonkeyPatch) -> None:
    """Makes a checkpoint of a few MiB go through what is otherwise for many GiB."""
    patch.setattr(sink, "LARGEST_PIECE", 300_000)
    patch.setattr(multipart, "SMALLEST_PART", 5 * MIB)
    patch.setattr(fsspec_transport, "_AZURE_PIPE_LIMIT", 6 * MIB)


def together(*actions: Callable[[], None]) -> None:
    """Runs each in a thread of its own, all at the same time.

    Raises:
        Exception: What the first of them raised that raised anything.
    """
    barrier = threading.Barrier(len(actions))
    errors: list[Exception] = []

    def run(action: Callable[[], None]) -> None:
        try:
            barrier.wait(timeout=60)
            action()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class StorageContract(OnStore):
    """The tests."""

    @pytest.fixture
    def plugin(self) -> TorchCheckpointIO:
        return TorchCheckpointIO()

    # What is saved is loaded

    @pytest.mark.parametrize("weights_only", [True, False])
    def test_a_checkpoint_is_loaded_as_it_was_saved(
        self, store: Store, plugin: TorchCheckpointIO, weights_only: bool
    ) -> None:
        saved: dict[str, Any] = {str(dtype): torch.arange(7).to(dtype) for dtype in DTYPES}
        saved |= {
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(5),
            "transposed": torch.arange(6.0).reshape(2, 3).t(),
            "plain": {"text": "é", "number": 2**70, "list": [1, None, (2.5, b"bytes")]},
        }
        if not weights_only:
            saved["object"] = Path("some/object")
        plugin.save_checkpoint(saved, store.url)
        assert_same(plugin.load_checkpoint(store.url, weights_only=weights_only), saved)
        assert store.outside.names() == [NAME]
        assert_same(torch.load(io.BytesIO(store.outside.get(NAME)), weights_only=weights_only), saved)

    def test_tensors_that_share_memory_are_saved_once_and_go_on_sharing_it(
        self, store: Store, plugin: TorchCheckpointIO
    ) -> None:
        weight = torch.arange(10_000.0)
        plugin.save_checkpoint({"a": weight, "tied": weight, "view": weight[10:20]}, store.url)
        assert len(store.outside.get(NAME)) < 1.5 * weight.nbytes
        loaded = plugin.load_checkpoint(store.url)
        loaded["a"][10] = -1
        assert loaded["tied"][10] == loaded["view"][0] == -1

    def test_loaded_tensors_can_be_trained_when_the_file_is_gone(self, store: Store, plugin: TorchCheckpointIO) -> None:
        plugin.save_checkpoint(checkpoint(3, size=100_000), store.url)
        loaded = plugin.load_checkpoint(store.url)
        store.outside.remove(NAME)
        loaded["w"].requires_grad_().sum().backward()
        torch.optim.SGD([loaded["w"]], lr=1.0).step()
        assert torch.equal(loaded["w"].detach(), torch.full((100_000,), 2.0))

    def test_map_location_and_weights_only_keep_their_meaning(self, store: Store, plugin: TorchCheckpointIO) -> None:
        plugin.save_checkpoint({"w": torch.ones(3), "object": Path("x")}, store.url)
        loaded = plugin.load_checkpoint(store.url, map_location="meta", weights_only=False)
        assert loaded["w"].is_meta
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            plugin.load_checkpoint(store.url, weights_only=True)

    def test_a_checkpoint_of_the_format_before_zip_files_is_loaded(
        self, store: Store, plugin: TorchCheckpointIO
    ) -> None:
        weight = torch.arange(10_000.0)
        saved = {"w": weight, "tied": weight, "text": "x"}
        store.outside.put("run/old.ckpt", serialized(saved, _use_new_zipfile_serialization=False))
        for weights_only in (True, False):
            loaded = plugin.load_checkpoint(f"{store.root}/run/old.ckpt", weights_only=weights_only)
            assert_same(loaded, saved)
            assert loaded["w"].data_ptr() == loaded["tied"].data_ptr()

    def test_tensors_are_loaded_one_by_one_when_they_are_asked_for(
        self, store: Store, plugin: TorchCheckpointIO
    ) -> None:
        saved = {"a": torch.arange(10_000.0), "b": torch.zeros(10_000), "step": 3}
        plugin.save_checkpoint(saved, store.url)
        lazy = _lazy_load(store.url)
        assert not isinstance(lazy["a"], torch.Tensor)
        assert lazy["step"] == 3
        assert_same(_materialize_tensors({"a": lazy["a"]}), {"a": saved["a"]})

    def test_fabric_saves_a_model_and_loads_into_it(self, store: Store) -> None:
        fabric = Fabric(accelerator="cpu", devices=1)
        model = torch.nn.Linear(2, 2)
        weight = model.weight.detach().clone()
        fabric.save(store.url, {"model": model, "step": 3})
        torch.nn.init.zeros_(model.weight)
        assert fabric.load(store.url, {"model": model}) == {"step": 3}
        assert torch.equal(model.weight, weight)

    def test_options_given_with_a_checkpoint_are_what_reaches_the_store(
        self, store: Store, plugin: TorchCheckpointIO, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if store.explicit is None:
            pytest.skip("this store is reached without options")
        url, options = f"{store.explicit.root}/run/x.ckpt", store.explicit.options
        fsspec.get_filesystem_class(url.partition(":")[0]).clear_instance_cache()  # no client that knows the way
        for name, value in store.explicit.misleading.items():
            monkeypatch.setenv(name, value)
        plugin.save_checkpoint(checkpoint(1), url, storage_options=options)
        assert store.outside.names() == [NAME]
        assert value_of(plugin.load_checkpoint(url, storage_options=options)) == 1
        plugin.remove_checkpoint(url, storage_options=options)
        assert store.outside.names() == []

    # Overwriting, and failures in the middle of it

    @pytest.mark.parametrize("sizes", [(10, 100_000), (100_000, 10)])
    def test_a_checkpoint_takes_the_place_of_a_shorter_and_of_a_longer_one(
        self, store: Store, plugin: TorchCheckpointIO, sizes: tuple[int, int]
    ) -> None:
        for value, size in enumerate(sizes):
            plugin.save_checkpoint(checkpoint(value, size), store.url)
            loaded = plugin.load_checkpoint(store.url)
            assert (value_of(loaded), len(loaded["w"])) == (value, size)
        assert store.outside.names() == [NAME]

    @pytest.mark.parametrize("error", FAILURES)
    def test_a_failure_in_the_middle_leaves_the_old_checkpoint_and_nothing_else(
        self, store: Store, plugin: TorchCheckpointIO, error: BaseException
    ) -> None:
        old = serialized(checkpoint(1))
        store.outside.put(NAME, old)
        for name in ("x.ckpt", "new.ckpt"):
            with pytest.raises(type(error)):
                plugin.save_checkpoint({"w": torch.zeros(1000), "bad": Raising(error)}, f"{store.root}/run/{name}")
            with pytest.raises(type(error)):
                write(f"{store.root}/run/{name}", serialized(checkpoint(2))[:3000], error)
        assert store.outside.names() == [NAME]
        assert store.outside.get(NAME) == old
        self.assert_nothing_is_unfinished(store)
        assert value_of(plugin.load_checkpoint(store.url)) == 1

    @pytest.mark.parametrize("error", [pytest.param(None, id="whole"), *FAILURES])
    def test_a_checkpoint_beyond_the_limits_of_one_request_is_whole_or_not_there(
        self, store: Store, plugin: TorchCheckpointIO, monkeypatch: pytest.MonkeyPatch, error: BaseException | None
    ) -> None:
        lower_limits(monkeypatch)
        old = serialized(checkpoint(1))
        new = serialized({"w": torch.arange(self.beyond_limits // 4, dtype=torch.float32)})
        store.outside.put(NAME, old)
        if error is None:
            write(store.url, new)
        else:
            with pytest.raises(type(error)):
                write(store.url, new[:-1000], error)
        assert store.outside.get(NAME) == (new if error is None else old)
        assert store.outside.names() == [NAME]
        self.assert_nothing_is_unfinished(store)
        assert set(plugin.load_checkpoint(store.url)) == ({"w"} if error is None else {"w", "step"})

    def test_an_empty_file_is_written_and_is_no_checkpoint(self, store: Store, plugin: TorchCheckpointIO) -> None:
        write(store.url, b"")
        assert store.outside.names() == [NAME]
        assert store.outside.get(NAME) == b""
        with pytest.raises(UNREADABLE):
            plugin.load_checkpoint(store.url)

    @pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
    def test_a_truncated_file_is_an_error(self, store: Store, plugin: TorchCheckpointIO, is_zip: bool) -> None:
        whole = serialized(checkpoint(1, size=10_000), _use_new_zipfile_serialization=is_zip)
        for kept in (10, len(whole) // 2, len(whole) - 1):
            store.outside.put(NAME, whole[:kept])
            with pytest.raises(UNREADABLE):
                plugin.load_checkpoint(store.url)

    def test_a_file_that_is_replaced_while_it_is_loaded_is_one_of_the_two_or_an_error(
        self, store: Store, plugin: TorchCheckpointIO
    ) -> None:
        size = self.beyond_limits // 8
        old, new = ({"a": torch.full((size,), value), "b": torch.full((size,), value)} for value in (1.0, 2.0))
        store.outside.put(NAME, serialized(old))

        def replace(storage: Any, place: str) -> Any:
            store.outside.put(NAME, serialized(new))
            return storage

        with suppress(*UNREADABLE):
            loaded = plugin.load_checkpoint(store.url, map_location=replace)
            assert torch.cat([loaded["a"], loaded["b"]]).unique().numel() == 1
        assert_same(plugin.load_checkpoint(store.url), new)

    def test_a_copy_takes_the_place_of_another_one(self, store: Store, plugin: TorchCheckpointIO) -> None:
        for value in (1, 2):
            name = f"{store.root}/run/epoch={value}-step={value}.ckpt"
            plugin.save_checkpoint(checkpoint(value, size=50_000), name)
            duplicate(name, f"{store.root}/run/last.ckpt")
            assert value_of(plugin.load_checkpoint(f"{store.root}/run/last.ckpt")) == value
        assert store.outside.get("run/last.ckpt") == store.outside.get("run/epoch=2-step=2.ckpt")
        assert store.outside.names() == ["run/epoch=1-step=1.ckpt", "run/epoch=2-step=2.ckpt", "run/last.ckpt"]

    # Names

    @pytest.mark.parametrize("name", NAMES)
    def test_names_are_literal(self, store: Store, plugin: TorchCheckpointIO, name: str) -> None:
        path = f"{name}/{name}.ckpt"
        url = f"{store.root}/{path}"
        for other in ("a1/a1.ckpt", "ab/ab.ckpt", "a/a.ckpt", "a b/a b.ckpt"):  # what others could take the name for
            store.outside.put(other, b"other")
        before = store.outside.names()
        if name in self.refused_names:
            with pytest.raises((ValueError, OSError), match=re.escape(path)):
                plugin.save_checkpoint(checkpoint(1), url)
            assert store.outside.names() == before
            return
        plugin.save_checkpoint(checkpoint(1), url)
        plugin.save_checkpoint(checkpoint(2), url)
        assert store.outside.names() == sorted([*before, path])
        assert value_of(plugin.load_checkpoint(url)) == 2
        assert _lazy_load(url)["step"] == 2
        plugin.remove_checkpoint(url)
        assert store.outside.names() == before

    def test_a_checkpoint_needs_no_folder(self, store: Store, plugin: TorchCheckpointIO) -> None:
        plugin.save_checkpoint(checkpoint(1), f"{store.root}/x.ckpt")
        plugin.save_checkpoint(checkpoint(2), f"{store.root}/x.ckpt")
        assert store.outside.names() == ["x.ckpt"]
        assert value_of(plugin.load_checkpoint(f"{store.root}/x.ckpt")) == 2
        plugin.remove_checkpoint(f"{store.root}/x.ckpt")
        assert store.outside.names() == []

    def test_a_slash_at_the_end_makes_no_other_name(self, store: Store, plugin: TorchCheckpointIO) -> None:
        with pytest.raises(IsADirectoryError, match="ends with a slash"):
            plugin.save_checkpoint(checkpoint(1), f"{store.root}/run/x.ckpt/")
        assert store.outside.names() == []
        plugin.save_checkpoint(checkpoint(1), store.url)
        assert value_of(plugin.load_checkpoint(f"{store.root}/run/x.ckpt/")) == 1
        plugin.remove_checkpoint(f"{store.root}/run/x.ckpt/")
        assert store.outside.names() == []

    # Several at a time

    def test_of_several_writers_of_one_path_one_wins(self, store: Store, plugin: TorchCheckpointIO) -> None:
        if not self.has_whole_puts:
            pytest.skip("this store mixes what is put under one name at a time")
        if not self.has_threads:
            pytest.skip("a client of this store cannot be used by several threads")
        url = store.url
        plugin.save_checkpoint(checkpoint(0), url)

        def writer(value: int) -> Callable[[], None]:
            return lambda: plugin.save_checkpoint(checkpoint(value, size=50_000 * value), url)

        def read() -> None:
            for _ in range(3):
                with suppress(*UNREADABLE):  # the file that is being read may have been replaced
                    assert value_of(plugin.load_checkpoint(url)) in (0, 1, 2)

        together(writer(1), writer(2), read)
        assert store.outside.names() == [NAME]
        assert value_of(plugin.load_checkpoint(url)) in (1, 2)
        self.assert_nothing_is_unfinished(store)

    def test_several_checkpoints_are_saved_and_loaded_at_once(self, store: Store, plugin: TorchCheckpointIO) -> None:
        if not self.has_threads:
            pytest.skip("a client of this store cannot be used by several threads")
        loaded = [-1.0] * 6

        def save_and_load(value: int) -> Callable[[], None]:
            def run() -> None:
                plugin.save_checkpoint(checkpoint(value, size=50_000), f"{store.root}/run {value}/x.ckpt")
                loaded[value] = value_of(plugin.load_checkpoint(f"{store.root}/run {value}/x.ckpt"))

            return run

        together(*(save_and_load(value) for value in range(6)))
        assert loaded == list(range(6))
        assert store.outside.names() == [f"run {value}/x.ckpt" for value in range(6)]

    # Removal, and what others do

    def test_removal_takes_one_name_and_is_content_with_none(self, store: Store, plugin: TorchCheckpointIO) -> None:
        stay = ["run/x", "run/x.ckpt.bak", "run/x.ckpt2/y", "run2/x.ckpt"]
        for name in [*stay, NAME]:
            store.outside.put(name, serialized(checkpoint(1)))
        for name in (NAME, NAME, "run/x.*", "nowhere/x.ckpt"):
            plugin.remove_checkpoint(f"{store.root}/{name}")
            assert store.outside.names() == stay
        with pytest.raises(FileNotFoundError, match=r"run/x\.ckpt"):
            plugin.load_checkpoint(store.url)

    def test_what_another_client_does_is_seen_at_once(self, store: Store, plugin: TorchCheckpointIO) -> None:
        url = store.url
        store.outside.put("run/other.ckpt", serialized(checkpoint(9)))
        for load in (plugin.load_checkpoint, _lazy_load):
            with pytest.raises(FileNotFoundError, match=r"x\.ckpt"):
                load(url)
        remember_listing(f"{store.root}/run")
        for value, size in ((1, 1000), (2, 30_000)):
            store.outside.put(NAME, serialized(checkpoint(value, size)))
            assert value_of(plugin.load_checkpoint(url)) == value
            assert _lazy_load(url)["step"] == value
            remember_listing(f"{store.root}/run")
        store.outside.remove(NAME)
        for load in (plugin.load_checkpoint, _lazy_load):
            with pytest.raises(FileNotFoundError, match=r"x\.ckpt"):
                load(url)
        plugin.save_checkpoint(checkpoint(3), url)
        assert store.outside.names() == ["run/other.ckpt", NAME]
