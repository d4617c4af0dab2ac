"""The progress of this process with its work on storage, which other ranks may wait for."""

_steps = 0


def made() -> None:
    """Counts a step: bytes that have been moved, or a request that has been answered, in whichever thread."""
    global _steps
    _steps += 1  # one of another thread may get lost, but the number is another one all the same


def count() -> int:
    """Returns a number that changes with each step."""
    return _steps
