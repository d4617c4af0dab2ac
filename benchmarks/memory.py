"""Watches how much memory this process takes for itself: anonymous and shared, not files that are mapped."""

import contextlib
import os
import re
import select
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SECONDS_BETWEEN_SAMPLES = 0.005
SAMPLES_BETWEEN_SCANS = 10


def shared_files(process: int) -> int:
    """Bytes of the files in memory that a process holds open: they take memory whether it maps them or not."""
    sizes: dict[int, int] = {}
    for link in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has just been closed
            if os.readlink(link).startswith(("/memfd:", "/dev/shm/")):
                found = link.stat()
                sizes[found.st_ino] = found.st_blocks * 512
    return sum(sizes.values())


def extent(process: int, files: int) -> int:
    """Bytes of anonymous and shared memory that a process uses, given those of the files in memory that it holds."""
    status = Path(f"/proc/{process}/status").read_text()
    sizes = {name: int(size) * 1024 for name, size in re.findall(r"(Rss\w+):\s+(\d+) kB", status)}
    return sizes["RssAnon"] + max(sizes["RssShmem"], files)


@dataclass
class Peak:
    """The most memory that was in use, and what was before, in bytes."""

    bytes: int = 0
    before: int = 0

    @property
    def extra(self) -> int:
        return self.bytes - self.before


class Watcher:
    """Samples this process from one beside it, which it forks when it is still small and has no threads."""

    def __init__(self) -> None:
        self._process = os.getpid()
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        if not os.fork():
            os.close(self._orders)
            self._serve(orders, answers)
            os._exit(0)
        os.close(orders)
        os.close(answers)

    def level(self) -> int:
        """Bytes in use now."""
        return extent(self._process, shared_files(self._process))

    @contextlib.contextmanager
    def watching(self) -> Iterator[Peak]:
        """Has the peak while the body ran, once it has ended."""
        peak = Peak(before=self.level())
        os.write(self._orders, b"s")
        yield peak
        os.write(self._orders, b"e")
        peak.bytes = max(int(os.read(self._answers, 100)), self.level())

    def _serve(self, orders: int, answers: int) -> None:
        while os.read(orders, 1):
            most = files = sample = 0
            while not select.select([orders], [], [], SECONDS_BETWEEN_SAMPLES)[0]:
                files = files if sample % SAMPLES_BETWEEN_SCANS else shared_files(self._process)
                most = max(most, extent(self._process, files))
                sample += 1
            os.read(orders, 1)
            os.write(answers, str(most).encode())
