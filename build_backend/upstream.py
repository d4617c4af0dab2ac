"""The released wheels that a build starts from: pinned by version and hash, fetched once, checked at every use."""

import configparser
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from build_backend.distribution import ROOT, Distribution

PINS = ROOT / "requirements" / "upstream.txt"
CACHE = ROOT / "build" / "upstream"

# What decides from where and how pip downloads. Everything else that a user has configured (constraints, hash mode,
# targets, formats, ...) is about what they install, and would break or divert the download of one pinned file.
NETWORK_SETTINGS = frozenset(
    {
        "cache-dir",
        "cert",
        "client-cert",
        "default-timeout",
        "extra-index-url",
        "find-links",
        "index-url",
        "keyring-provider",
        "no-cache-dir",
        "no-index",
        "proxy",
        "pypi-url",
        "resume-retries",
        "retries",
        "timeout",
        "trusted-host",
        "use-deprecated",
        "use-feature",
    }
)
#: Releases that were malicious, and are gone from the index: nothing is built from them, wherever they come from.
MALICIOUS = frozenset({"2.6.2", "2.6.3"})
_PIN = re.compile(r"(?P<name>[\w-]+)==(?P<version>[\w.]+) +--hash=sha256:(?P<sha256>[0-9a-f]{64})")
_URL_CREDENTIALS = re.compile(r"(?<=://)[^/\s]*@")


@dataclass(frozen=True)
class Pin:
    """One line of ``requirements/upstream.txt``."""

    name: str
    version: str
    sha256: str

    @property
    def file_name(self) -> str:
        """The wheel's file name."""
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"

    @property
    def requirement(self) -> str:
        """The line for pip."""
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}"


def read_pin(distribution: Distribution) -> Pin:
    """Return the pin of the released wheel that ``distribution`` starts from.

    Raises:
        ValueError: If the file of pins has a line in another form, or no line for the distribution.

    """
    text = PINS.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        match = _PIN.fullmatch(line.strip())
        if match is None:
            raise ValueError(f"{PINS}: expected 'name==version --hash=sha256:<64 hex digits>', found {line!r}")
        if match["name"] == distribution.name:
            return Pin(**match.groupdict())
    raise ValueError(f"{PINS}: no line for {distribution.name}")


def needs_download(distribution: Distribution) -> bool:
    """Tell whether a build has to fetch the released wheel from the package index."""
    pin = read_pin(distribution)
    return not os.environ.get("LIGHTNING_UPSTREAM_DIR") and _read_cached(pin) is None


def read_pristine_wheel(distribution: Distribution) -> bytes:
    """Return the content of the released wheel, whose hash has been checked.

    It comes from the folder ``LIGHTNING_UPSTREAM_DIR`` if that is set, else from the cache, else from the package
    index.

    Raises:
        FileNotFoundError: If the folder lacks the wheel.
        ValueError: If the wheel in the folder is not the pinned one.
        RuntimeError: If the download fails.

    """
    pin = read_pin(distribution)
    folder = os.environ.get("LIGHTNING_UPSTREAM_DIR")
    if not folder:
        # A cache that does not match is no user's file: it is an interrupted or outdated download, so fetch it again.
        return _read_cached(pin) or _download(pin)
    path = Path(folder) / pin.file_name
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: put the released wheel with sha256 {pin.sha256} there, or unset"
            " LIGHTNING_UPSTREAM_DIR to download it"
        )
    return _checked(path.read_bytes(), pin, str(path))


def download_release(name: str, version: str, folder: Path) -> Pin:
    """Download a released wheel of any version into ``folder``, and return the pin of what came.

    Raises:
        ValueError: If the release is known to be malicious.
        RuntimeError: If the download fails.

    """
    if version in MALICIOUS:
        raise ValueError(f"{name} {version} was malicious: check another version")
    options = ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), "--quiet"]
    _run_pip(["download", *options, f"{name}=={version}"], _download_environment(), f"download {name} {version}")
    wheel = Pin(name, version, "")
    content = (folder / wheel.file_name).read_bytes()
    return Pin(name, version, hashlib.sha256(content).hexdigest())


def write_pins(pins: Sequence[Pin]) -> None:
    """Have builds start from these wheels; the comments at the head of the file stay."""
    comments = [line for line in PINS.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    lines = [f"{pin.name}=={pin.version} \\\n    --hash=sha256:{pin.sha256}" for pin in pins]
    PINS.write_text("\n".join([*comments, *lines, ""]), encoding="utf-8")


def _checked(content: bytes, pin: Pin, origin: str) -> bytes:
    found = hashlib.sha256(content).hexdigest()
    if found != pin.sha256:
        raise ValueError(
            f"{origin} is not the released {pin.name} {pin.version}: expected sha256 {pin.sha256}, found {found}."
            " Nothing was built. Replace the file by the released one"
        )
    return content


def _read_cached(pin: Pin) -> bytes | None:
    path = CACHE / pin.file_name
    if not path.is_file():
        return None
    content = path.read_bytes()
    return content if hashlib.sha256(content).hexdigest() == pin.sha256 else None


def _download(pin: Pin) -> bytes:
    if importlib.util.find_spec("pip") is None:
        raise RuntimeError(
            f"pip is needed to download {pin.name} {pin.version}, and {sys.executable} has none: install it there,"
            " build with build isolation, or set LIGHTNING_UPSTREAM_DIR to a folder with the released wheels"
        )
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        requirements = Path(temporary) / "requirements.txt"
        requirements.write_text(pin.requirement + "\n", encoding="utf-8")
        options = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--dest", temporary, "--quiet"]
        purpose = f"download {pin.name} {pin.version}"
        _run_pip(["download", *options, "--requirement", str(requirements)], _download_environment(), purpose)
        downloaded = Path(temporary) / pin.file_name
        content = _checked(downloaded.read_bytes(), pin, f"The download of {pin.name}")
        # Atomic, so that builds side by side never see half a file.
        os.replace(downloaded, CACHE / pin.file_name)
    return content


def _download_environment() -> dict[str, str]:
    """Return the environment for pip with the user's network settings and none of their other pip settings."""
    settings: dict[str, dict[str, str]] = {"global": {}, "download": {}}
    for path in _pip_configuration_files():
        # Not ConfigParser: pip does not interpolate either, and a password may well hold a percent sign.
        parser = configparser.RawConfigParser()
        parser.read(path)
        for section in settings.keys() & set(parser.sections()):
            settings[section] |= {_setting_name(key): value for key, value in parser.items(section)}
    # pip's own order: a command's section before the global one, and environment variables before files.
    merged = settings["global"] | settings["download"]
    environment = dict(os.environ)
    for variable in [name for name in environment if name.startswith("PIP_")]:
        value = environment.pop(variable)
        if value:  # pip takes an empty variable as unset
            merged[_setting_name(variable.removeprefix("PIP_"))] = value
    for key in merged.keys() & NETWORK_SETTINGS:
        environment["PIP_" + key.upper().replace("-", "_")] = merged[key]
    return environment | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def _setting_name(key: str) -> str:
    return key.lower().replace("_", "-").removeprefix("--")


def _pip_configuration_files() -> list[str]:
    """Return the configuration files that exist, in the order in which later ones override earlier ones.

    Only pip knows where they are, but not one of its commands prints the settings merged in that order.

    """
    if os.environ.get("PIP_CONFIG_FILE") == os.devnull:  # pip's way to switch all files off
        return []
    files: dict[str, list[str]] = {"global": [], "user": [], "site": [], "env": []}
    kind = ""
    # The user may have silenced pip, but not for us.
    for line in _run_pip(
        ["config", "debug"], os.environ | {"PIP_QUIET": "0", "PIP_VERBOSE": "0"}, "list its configuration files"
    ).splitlines():
        if header := re.fullmatch(r"(\w+):", line):
            kind = header[1]
        elif kind in files and (file := re.fullmatch(r"\s+(.+), exists: True", line)):
            files[kind].append(file[1])
    return [file for group in files.values() for file in group]


def _run_pip(arguments: list[str], environment: Mapping[str, str], purpose: str) -> str:
    command = [sys.executable, "-m", "pip", *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(
            f"pip could not {purpose}:\n{without_credentials(result.stdout + result.stderr).strip()}\nCheck pip's index"
            " and proxy settings (PIP_INDEX_URL or pip's configuration file; the options of an outer pip or uv do not"
            " reach this download), or set LIGHTNING_UPSTREAM_DIR to a folder with the released wheels"
        )
    return result.stdout


def without_credentials(text: str) -> str:
    """Mask user names, passwords and tokens in the URLs of ``text``."""
    return _URL_CREDENTIALS.sub("****@", text)
