"""The first bytes of files of many kinds, for errors about files that are no checkpoints."""

from torch.serialization import MAGIC_NUMBER

from lightning.fabric.storage.archives.archive_reader import ARCHIVE

#: The bytes of a file to look at.
START = 512
#: Formats before PyTorch 1.6 have a number near the first byte, in binary or in decimal. The oldest is a tar archive.
_NUMBERS = (MAGIC_NUMBER.to_bytes(10, "little"), str(MAGIC_NUMBER).encode())
_TAR, _TAR_AT = b"ustar", 257
_UNPACK = "Unpack it"
#: The first bytes in small letters, the kind, and what to do.
_KINDS = (
    ((b"<!doctype html", b"<html"), "an HTML page", "Download the file itself, and not the page that shows it"),
    ((b"<?xml", b"<error"), "XML, such as the error of a store", "Read it, and download the file anew"),
    ((b"version https://git-lfs",), "what Git LFS has in the place of a file", "Fetch the file with `git lfs pull`"),
    ((b"\x1f\x8b",), "a file that is compressed with gzip", _UNPACK),
    ((b"bzh",), "a file that is compressed with bzip2", _UNPACK),
    ((b"\xfd7zxz",), "a file that is compressed with xz", _UNPACK),
    ((b"\x28\xb5\x2f\xfd",), "a file that is compressed with Zstandard", _UNPACK),
    ((b"\x89hdf",), "HDF5", "Load it with h5py, or with Keras"),
    ((b"\x93numpy",), "an array of NumPy", "Load it with numpy.load"),
    ((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"), "a pickle that is not torch.save's", ""),
    ((b"{", b"["), "JSON", ""),
    ((b"\0" * 16,), "nothing but zeros", "Copy it anew: a file system has lost what was written"),
)


def why_no_checkpoint(start: bytes) -> str | None:
    """Returns what a file is that :func:`torch.save` has not written, and what to do.

    Args:
        start: The first :data:`START` bytes of the file, or all of a smaller one.

    Returns:
        The end of a sentence and more sentences, without a full stop; None if the file may be torch's.
    """
    if (
        start.startswith(ARCHIVE)
        or any(number in start[:32] for number in _NUMBERS)
        or start[_TAR_AT:].startswith(_TAR)
    ):
        return None
    if not start:
        return "it is empty. Whoever wrote or copied it was interrupted: use another one"
    text = start.lstrip().lower()
    if start[8:9] == b"{":
        return "it looks like safetensors. Load it with safetensors.torch.load_file, and give what comes to the model"
    for starts, kind, advice in _KINDS:
        if text.startswith(starts):
            return f"it looks like {kind}. {advice or 'Give the path of a file that torch.save has written'}"
    return f"it begins with {start[:16]!r}. Give the path of a file that torch.save has written"
