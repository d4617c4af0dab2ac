"""S3 servers that `make test-stores` installs: rclone, JuiceFS's gateway (MinIO's code), s3rver, nanio; and nginx."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from typing_extensions import override

from tests.servers.credentials import SECRET
from tests.servers.processes import free_ports, running
from tests.servers.s3 import Bucket, Server, s3_client

#: Where `make test-stores` puts them.
FOLDER = Path(__file__).parents[2] / "build/stores"
MISSING = "the S3 servers are not installed: `make test-stores` installs them with pip and npm, and runs these tests"
S3RVER = FOLDER / "node_modules/s3rver/bin/s3rver.js"
#: Debian has it where only root finds it.
NGINX = shutil.which("nginx", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"]))


WITHOUT_NGINX = "nginx is not installed"


def is_installed() -> bool:
    return S3RVER.is_file() and shutil.which("node") is not None and all(map(Path.is_file, map(_program, _PACKAGED)))


_NGINX_CONFIGURATION = """
daemon off;
master_process off;
pid nginx.pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_max_body_size 0;
    client_body_temp_path bodies;
    proxy_temp_path answers;
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass {target};
            proxy_set_header Host $http_host;
        }}
    }}
}}
"""
_PACKAGED = ("rclone", "juicefs", "nanio")


def _program(name: str) -> Path:
    return FOLDER / "venv/bin" / name


@contextmanager
def _serving(
    folder: Path, command: Callable[[int], list[str]], environment: dict[str, str], key: str = "test"
) -> Iterator[Server]:
    (port,) = free_ports(1)
    endpoint = f"http://127.0.0.1:{port}"
    client = s3_client(endpoint, key)
    with running(command(port), folder, client.list_buckets, environment):
        yield Server(endpoint, client, key=key)


class RcloneBucket(Bucket):
    @override
    def unfinished_uploads(self) -> list[str]:
        try:
            return super().unfinished_uploads()
        except self.server.client.exceptions.NoSuchUpload:  # what it says of a bucket that never had one
            return []


def rclone_server(folder: Path) -> AbstractContextManager[Server]:
    """Starts rclone, which serves the folders in ``folder`` as buckets."""
    data = folder / "data"
    data.mkdir()
    # without the second, what another client removes seems to be there for as long as a listing is remembered
    options = ["--auth-key", f"test,{SECRET}", "--dir-cache-time", "1ms"]
    return _serving(
        folder,
        lambda port: [str(_program("rclone")), "serve", "s3", str(data), "--addr", f"127.0.0.1:{port}", *options],
        {"RCLONE_CONFIG": str(folder / "none.conf")},
    )


def juicefs_server(folder: Path) -> AbstractContextManager[Server]:
    """Starts JuiceFS's gateway, whose bytes and SQLite database are in ``folder``."""
    program, database = str(_program("juicefs")), f"sqlite3://{folder}/meta.db"
    home = {"HOME": str(folder)}
    subprocess.run(
        [
            program,
            "format",
            "--storage",
            "file",
            "--bucket",
            f"{folder}/blocks/",
            "--trash-days",
            "0",
            database,
            "store",
        ],
        cwd=folder,
        env=os.environ | home,
        check=True,
        capture_output=True,
    )
    options = ["--multi-buckets", "--no-usage-report", "--cache-dir", f"{folder}/cache", "--keep-etag"]
    return _serving(
        folder,
        lambda port: [program, "gateway", database, f"127.0.0.1:{port}", *options],
        {**home, "MINIO_ROOT_USER": "test", "MINIO_ROOT_PASSWORD": SECRET},
    )


def s3rver_server(folder: Path) -> AbstractContextManager[Server]:
    """Starts s3rver, which knows no other secret than its own: it is told not to check signatures.

    It enciphers what a listing goes on from with DES, which Node has had no more by default since version 17: all
    listings that do not end with the first page, as when a client asks for one name to see a folder, would be answered
    with 500.
    """
    node = ["node", "--openssl-legacy-provider", str(S3RVER)]
    options = ["--address", "127.0.0.1", "--silent", "--no-vhost-buckets", "--allow-mismatched-signatures"]
    return _serving(
        folder,
        lambda port: [*node, "--directory", str(folder / "data"), "--port", str(port), *options],
        {},
        key="S3RVER",  # which is the only one that it knows
    )


def nanio_server(folder: Path) -> AbstractContextManager[Server]:
    """Starts nanio, which keeps objects as files."""
    options = ["--data-dir", str(folder / "data"), "--host", "127.0.0.1", "--no-access-log"]
    return _serving(
        folder,
        lambda port: [str(_program("nanio")), "serve", "--port", str(port), *options],
        {"NANIO_ACCESS_KEY": "test", "NANIO_SECRET_KEY": SECRET},
    )


@contextmanager
def nginx_before_juicefs(folder: Path) -> Iterator[Server]:
    """Starts JuiceFS's gateway, which checks signatures, behind an nginx with nothing set that need not be."""
    assert NGINX is not None
    with juicefs_server(folder) as server:
        (port,) = free_ports(1)
        here = folder / "nginx"
        here.mkdir()
        (here / "nginx.conf").write_text(_NGINX_CONFIGURATION.format(port=port, target=server.endpoint))
        endpoint = f"http://127.0.0.1:{port}"
        client = s3_client(endpoint)
        with running([NGINX, "-p", str(here), "-c", "nginx.conf", "-e", "stderr"], here, client.list_buckets):
            yield Server(endpoint, client)
