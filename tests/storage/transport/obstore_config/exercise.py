"""What each kind of store has to do."""

import re
from pathlib import Path
from typing import Any

import obstore

from tests.storage.transport.obstore_config.recorder import Request

NAME = "run/epoch=1 [b]? *#%+ü.ckpt"
MIB = 2**20


def exercise(native: tuple[Any, str] | None) -> None:
    """Writes an object in one piece and another one in parts, and reads them."""
    assert native is not None
    store, name = native
    obstore.put(store, name, b"0123456789", mode="create")
    parts = b"a" * 5 * MIB + b"b" * MIB
    obstore.put(store, f"{name}.parts", parts, chunk_size=5 * MIB)
    assert bytes(obstore.get_range(store, name, start=2, end=5)) == b"234"
    assert bytes(obstore.get_range(store, f"{name}.parts", start=5 * MIB - 1, end=5 * MIB + 2)) == b"abb"
    assert obstore.head(store, f"{name}.parts")["size"] == 6 * MIB


def documented_variables(client: str) -> list[str]:
    """The environment variables that the installed obstore says it reads for a kind of store."""
    stub = Path(obstore.__file__).parent / "_store" / f"_{client}.pyi"
    return sorted(set(re.findall(r"`((?:AWS|GOOGLE|AZURE)_[A-Z0-9_]+)`", stub.read_text())))


def poison(variable: str, elsewhere: str) -> str:
    """A value for a variable of obstore's that leads astray, if anything does, and not to an error."""
    switches = ("SKIP", "DISABLE", "EXPRESS", "PAYER", "FALLBACK", "UNSIGNED", "VIRTUAL", "EMULATOR", "_CLI", "ENABLED")
    exact = {
        "AWS_CONDITIONAL_PUT": "disabled",
        "AWS_COPY_IF_NOT_EXISTS": "multipart",
        "AWS_CHECKSUM_ALGORITHM": "SHA256",
        "AWS_SERVER_SIDE_ENCRYPTION": "AES256",
        "AZURE_CREDENTIAL_TYPE": "sas_token",
    }
    return exact.get(variable) or ("true" if any(switch in variable for switch in switches) else elsewhere)


def without_times(requests: list[Request]) -> set[tuple[Any, ...]]:
    """What is the same whenever requests are sent."""
    return {
        (
            request.method,
            re.sub("blockid=[^&]*", "", request.target),
            re.sub("(Signature=|SharedKey [^:]*:).*", r"\1", request.headers.get("authorization", "")),
            *sorted(item for item in request.headers.items() if not re.search("date|authorization", item[0])),
        )
        for request in requests
    }
