"""Exchanging two names of a local file system, so that neither is missing at any moment."""

import ctypes
import errno
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

#: The function of the C library, and its arguments; None stands for a path.
_FUNCTIONS = {
    "linux": ("renameat2", (-100, None, -100, None, 2)),  # AT_FDCWD, and RENAME_EXCHANGE; since glibc 2.28
    "darwin": ("renamex_np", (None, None, 2)),  # RENAME_SWAP
}
#: What systems and file systems answer that cannot do it; also where one of the two is on a lower layer of an overlay.
_UNABLE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV)


def exchange(one: Path, other: Path) -> bool:
    """Gives each of two files or folders the name of the other.

    Returns:
        False if the system or the file system cannot do it; nothing has happened then.

    Raises:
        OSError: It failed for another reason.
    """
    call = _system_call()
    if call is None:
        return False
    if call(os.fsencode(os.path.abspath(one)), os.fsencode(os.path.abspath(other))) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNABLE:
        return False
    raise OSError(number, os.strerror(number), os.fspath(one), None, os.fspath(other))


@cache
def _system_call() -> Callable[[bytes, bytes], int] | None:
    """What exchanges two absolute paths, and sets ctypes' errno if it does not return zero."""
    if sys.platform not in _FUNCTIONS:
        return None
    name, arguments = _FUNCTIONS[sys.platform]
    function: Any = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:
        return None
    function.argtypes = [ctypes.c_char_p if argument is None else ctypes.c_int for argument in arguments]
    function.restype = ctypes.c_int

    def call(*paths: bytes) -> int:
        given = iter(paths)
        return int(function(*(next(given) if argument is None else argument for argument in arguments)))

    return call
