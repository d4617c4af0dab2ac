"""Packs an assembled tree as a wheel: metadata, RECORD and a reproducible archive."""

import base64
import hashlib
import io
import os
import re
import time
import zipfile
from pathlib import Path, PurePosixPath

from build_backend.assemble import version
from build_backend.distribution import ROOT, Distribution
from build_backend.upstream import read_pin

CLOUD_REQUIREMENTS = ROOT / "requirements" / "cloud.txt"
CLOUD_CLIENTS = {"s3": "s3fs", "gcs": "gcsfs", "azure": "adlfs"}
CLOUD_ENGINE = "obstore"
# The earliest time that a zip archive can hold.
_EARLIEST = 315532800


def dist_info_name(distribution: Distribution) -> str:
    """Return the name of the wheel's folder of metadata."""
    return f"{distribution.file_name}-{version(distribution)}.dist-info"


def wheel_name(distribution: Distribution) -> str:
    """Return the wheel's file name."""
    return f"{distribution.file_name}-{version(distribution)}-py3-none-any.whl"


def dist_info(distribution: Distribution, pristine: bytes) -> dict[str, bytes]:
    """Return the files of the dist-info folder but RECORD: upstream's, with our version, extras and notice."""
    prefix = f"{distribution.file_name}-{read_pin(distribution).version}.dist-info/"
    with zipfile.ZipFile(io.BytesIO(pristine)) as archive:
        names = [name for name in archive.namelist() if name.startswith(prefix)]
        files = {name.removeprefix(prefix): archive.read(name) for name in names}
    del files["RECORD"]
    files["METADATA"] = metadata(distribution, files["METADATA"].decode("utf-8")).encode("utf-8")
    generator = f"Generator: lightning-io ({version(distribution)})".encode()
    files["WHEEL"] = re.sub(rb"^Generator: .*$", generator, files["WHEEL"], count=1, flags=re.MULTILINE)
    files["licenses/NOTICE"] = (ROOT / "NOTICE").read_bytes()
    return files


def metadata(distribution: Distribution, upstream: str) -> str:
    """Return upstream's metadata with our version, our notice among the licence files, and our extras."""
    header, separator, description = upstream.partition("\n\n")
    lines = header.split("\n")
    lines[lines.index(f"Version: {read_pin(distribution).version}")] = f"Version: {version(distribution)}"
    lines.insert(lines.index("License-File: LICENSE") + 1, "License-File: NOTICE")
    first_dynamic = next(number for number, line in enumerate(lines) if line.startswith("Dynamic: "))
    lines[first_dynamic:first_dynamic] = _extras()
    return "\n".join(lines) + separator + description


def _extras() -> list[str]:
    lines = CLOUD_REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    requirements = {re.split(r"[^\w-]", line)[0]: line for line in lines if line and not line.startswith("#")}
    clients = {extra: [client] for extra, client in CLOUD_CLIENTS.items()} | {"cloud": list(CLOUD_CLIENTS.values())}
    extras = []
    for extra, names in clients.items():
        extras.append(f"Provides-Extra: {extra}")
        extras += [f'Requires-Dist: {requirements[name]}; extra == "{extra}"' for name in [*names, CLOUD_ENGINE]]
    return extras


def tree_files(tree: Path) -> dict[str, bytes]:
    """Return the content of all files below ``tree`` by their path in the wheel."""
    files = (path for path in tree.rglob("*") if path.is_file())
    return {path.relative_to(tree).as_posix(): path.read_bytes() for path in files}


def write_wheel(path: Path, distribution: Distribution, packages: dict[str, bytes], info: dict[str, bytes]) -> None:
    """Write a wheel: same content, same bytes."""
    folder = dist_info_name(distribution)
    files = dict(sorted(packages.items())) | {f"{folder}/{name}": content for name, content in sorted(info.items())}
    record = "".join(f"{name},{_digest(content)},{len(content)}\n" for name, content in files.items())
    # Last, as the wheel specification recommends.
    files[f"{folder}/RECORD"] = f"{record}{folder}/RECORD,,\n".encode()
    date = time.gmtime(max(source_date(), _EARLIEST))[:6]
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            member = zipfile.ZipInfo(name, date)
            member.create_system = 3  # Unix, also when built elsewhere: it is what gives the mode below its meaning
            member.external_attr = 0o100644 << 16
            archive.writestr(member, content, zipfile.ZIP_DEFLATED, compresslevel=9)


def write_dist_info(folder: Path, distribution: Distribution, info: dict[str, bytes]) -> str:
    """Write the dist-info folder below ``folder`` and return its name."""
    name = dist_info_name(distribution)
    for file, content in info.items():
        path = folder / name / PurePosixPath(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return name


def source_date() -> int:
    """Return the time stamp of everything that is packed, in seconds since 1970."""
    return int(os.environ.get("SOURCE_DATE_EPOCH") or _EARLIEST)


def _digest(content: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
