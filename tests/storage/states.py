"""Checkpoints for tests, and whether they are what they were."""

import io
from typing import Any

import torch


class Raising:
    """Raises when it is pickled."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


def serialized(state: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer, **options)
    return buffer.getvalue()


def checkpoint(value: float = 1.0, size: int = 1000) -> dict[str, Any]:
    return {"w": torch.full((size,), float(value)), "step": int(value)}


def value_of(loaded: dict[str, Any]) -> float:
    """What a :func:`checkpoint` was made with, if it is whole."""
    assert set(loaded) == {"w", "step"}
    value = loaded["w"][0].item()
    assert torch.equal(loaded["w"], torch.full_like(loaded["w"], value))
    assert loaded["step"] == value
    return float(value)


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert_same(dict(enumerate(left)), dict(enumerate(right)))
    elif isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert left.stride() == right.stride()
        assert left.contiguous().reshape(-1).view(torch.uint8).equal(right.contiguous().reshape(-1).view(torch.uint8))
    else:
        assert left == right
