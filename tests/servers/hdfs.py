"""HDFS: one name node and one data node, with WebHDFS, and the native library that pyarrow talks to them with.

No package index has a Hadoop that runs. But PySpark's source package carries Hadoop's jars, Debian has the few that
WebHDFS needs beside those, and pydoop's source package has the C sources of libhdfs. ``python -m tests.servers.hdfs``
puts them together.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import uuid
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote
from urllib.request import urlopen
from xml.sax.saxutils import escape

import requests

from tests.servers.credentials import USER
from tests.servers.processes import free_ports, running

FOLDER = Path(__file__).parents[2] / "build" / "hdfs"
#: Packages for those tests only.
PYTHON = FOLDER / "python"
MISSING = "HDFS is not installed: run `make test-hdfs`"

#: The last with the jars of a Hadoop's servers. Both are built by what setuptools had until release 70.
_PYSPARK, _PYDOOP, _PYARROW = "pyspark==2.4.8", "pydoop==2.0.0", "pyarrow==26.0.1"
_DEBIAN = ["libcommons-daemon-java", "libjsr311-api-java", "libasm-java"]
_DEBIAN += [f"libjersey1-{part}-java" for part in ("core", "server", "servlet", "json")]
#: PySpark's, which would be found in the place of WebHDFS's own, being other versions of it; and what nothing needs.
_IN_THE_WAY = ("javax.ws.rs-api", "jersey-", "spark-", "hive-", "scala-", "breeze", "kubernetes-")
#: What Hadoop of that time looks into, and today's Java would not let it.
_OPENED = ("java.lang", "java.lang.reflect", "java.nio", "java.util", "java.net", "java.io", "sun.nio.ch")


@dataclass
class Hdfs:
    """A running cluster."""

    rpc_port: int
    http_port: int

    @property
    def native_url(self) -> str:
        return f"hdfs://{USER}@127.0.0.1:{self.rpc_port}"

    @property
    def web_url(self) -> str:
        return f"webhdfs://{USER}@127.0.0.1:{self.http_port}"


@dataclass
class HdfsFolder:
    """An empty folder of its own for a test, seen through WebHDFS without any client."""

    cluster: Hdfs
    path: str = field(default_factory=lambda: f"/test-{uuid.uuid4().hex[:12]}")

    def __post_init__(self) -> None:
        self._ask("MKDIRS", "", "PUT")

    def names(self) -> list[str]:
        return sorted(self._names(""))

    def _names(self, folder: str) -> Iterator[str]:
        for status in json.loads(self._ask("LISTSTATUS", folder))["FileStatuses"]["FileStatus"]:
            name = f"{folder}/{status['pathSuffix']}".lstrip("/")
            if status["type"] == "FILE":
                yield name
            else:
                yield from self._names(name)

    def get(self, name: str) -> bytes:
        return self._ask("OPEN", name)

    def put(self, name: str, content: bytes) -> None:
        self._ask("CREATE&overwrite=true", name, "PUT", content)

    def remove(self, name: str) -> None:
        self._ask("DELETE", name, "DELETE")

    def unfinished_uploads(self) -> list[str]:
        return []

    def _ask(self, operation: str, name: str, method: str = "GET", data: bytes | None = None) -> bytes:
        path = quote(f"{self.path}/{name}".rstrip("/"))
        url = f"http://127.0.0.1:{self.cluster.http_port}/webhdfs/v1{path}?op={operation}&user.name={USER}"
        answer = requests.request(method, url, data=data, timeout=60)  # follows on to the data node
        answer.raise_for_status()
        return answer.content


def is_installed() -> bool:
    return (FOLDER / "installed").exists()


def java_home() -> Path:
    """Where the JDK is that `javac` belongs to.

    Raises:
        RuntimeError: There is none.
    """
    compiler = shutil.which("javac")
    if compiler is None:
        raise RuntimeError("HDFS needs a JDK: install one (on Debian and Ubuntu: default-jdk-headless)")
    return Path(compiler).resolve().parents[1]


def environment() -> dict[str, str]:
    """What the native library needs in a process before it is first used."""
    return {
        "ARROW_LIBHDFS_DIR": str(FOLDER),
        "CLASSPATH": _class_path(),
        "JAVA_HOME": str(java_home()),
        "LIBHDFS_OPTS": " ".join(["-Xmx512m", "-Xrs", *_java_options()]),
    }


def _class_path() -> str:
    return ":".join(map(str, sorted((FOLDER / "jars").glob("*.jar"))))


def _java_options() -> list[str]:
    return [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED] + [
        "--add-opens=java.security.jgss/sun.security.krb5=ALL-UNNAMED",
        "-Djava.net.preferIPv4Stack=true",
    ]


def install() -> None:
    """Installs all into :data:`FOLDER`, and tries it, which takes minutes, and 220 MB to fetch."""
    home = java_home()
    for program in ("gcc", "apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise RuntimeError(f"{program} is missing, which HDFS is put together with: this needs Debian or Ubuntu")
    shutil.rmtree(FOLDER, ignore_errors=True)
    (FOLDER / "jars").mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as name:
        scratch = Path(name)
        _collect_jars(scratch)
        _build_library(scratch, home)
    run(sys.executable, "-m", "pip", "install", "--quiet", "--target", PYTHON, "--no-deps", _PYARROW)
    with tempfile.TemporaryDirectory(dir=FOLDER) as name, hdfs_cluster(Path(name)):
        pass  # it starts
    (FOLDER / "installed").touch()


def _collect_jars(scratch: Path) -> None:
    for name in _unpack(_PYSPARK, scratch, "/deps/jars/"):
        if name.suffix == ".jar" and not name.name.startswith(_IN_THE_WAY):
            name.rename(FOLDER / "jars" / name.name)
    run("apt-get", "download", *_DEBIAN, cwd=scratch)
    for package in scratch.glob("*.deb"):
        run("dpkg-deb", "-x", package, scratch / "debian")
    for jar in (scratch / "debian" / "usr" / "share" / "java").glob("*.jar"):
        if not jar.is_symlink():
            shutil.copy(jar, FOLDER / "jars")


def _build_library(scratch: Path, home: Path) -> None:
    sources = [path for path in _unpack(_PYDOOP, scratch, "/src/libhdfs/") if path.suffix == ".c"]
    top = next(path.parent for path in sources if path.name == "hdfs.c")
    wanted = [path for path in sources if path.parent in (top, top / "common", top / "os" / "posix")]
    include = [top, top / "include", top / "common", top / "os" / "posix", home / "include", home / "include" / "linux"]
    java = home / "lib" / "server"
    command = ["gcc", "-O1", "-w", "-shared", "-fPIC", *(f"-I{folder}" for folder in include), *wanted]
    run(*command, f"-L{java}", f"-Wl,-rpath,{java}", "-ljvm", "-lpthread", "-o", FOLDER / "libhdfs.so")


def _unpack(requirement: str, scratch: Path, folder: str) -> list[Path]:
    """The files below a folder of a source package."""
    python = scratch / "venv" / "bin" / "python"
    if not python.exists():
        venv.create(scratch / "venv", with_pip=True)
        run(python, "-m", "pip", "install", "--quiet", "setuptools<70", "wheel")
    fetch = ["download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", "--dest", scratch]
    run(python, "-m", "pip", *fetch, requirement, HADOOP_HOME=str(scratch))
    with tarfile.open(scratch / f"{requirement.replace('==', '-')}.tar.gz") as archive:
        members = [member for member in archive.getmembers() if member.isfile() and folder in member.name]
        archive.extractall(scratch, members)
    return [scratch / member.name for member in members]


def run(*command: str | Path, cwd: Path | None = None, **variables: str) -> None:
    subprocess.run(command, cwd=cwd, env=os.environ | variables, check=True)


@contextmanager
def hdfs_cluster(folder: Path) -> Iterator[Hdfs]:
    """Starts the two nodes, which keep what they have in ``folder``. Takes about ten seconds."""
    name, web, secondary, data, data_web, data_rpc = free_ports(6)
    settings = {
        "fs.defaultFS": f"hdfs://127.0.0.1:{name}",
        "hadoop.tmp.dir": str(folder / "data"),
        "dfs.replication": "1",
        "dfs.permissions.enabled": "false",
        "dfs.namenode.http-address": f"127.0.0.1:{web}",
        "dfs.namenode.secondary.http-address": f"127.0.0.1:{secondary}",
        "dfs.namenode.safemode.threshold-pct": "0",
        "dfs.datanode.address": f"127.0.0.1:{data}",
        "dfs.datanode.http.address": f"127.0.0.1:{data_web}",
        "dfs.datanode.ipc.address": f"127.0.0.1:{data_rpc}",
        "dfs.datanode.hostname": "127.0.0.1",
        "dfs.namenode.fs-limits.min-block-size": "0",
    }
    properties = "".join(
        f"<property><name>{k}</name><value>{escape(v)}</value></property>" for k, v in settings.items()
    )
    for site in ("core-site.xml", "hdfs-site.xml"):
        (folder / site).write_text(f"<configuration>{properties}</configuration>")
    for pages in ("hdfs", "datanode", "static"):
        (folder / "webapps" / pages).mkdir(parents=True)
    java = [str(java_home() / "bin" / "java"), "-Xmx512m", *_java_options(), f"-Dhadoop.home.dir={folder}"]
    java += ["-cp", f"{folder}:{_class_path()}"]
    node = "org.apache.hadoop.hdfs.server"
    run(*java, f"{node}.namenode.NameNode", "-format", "-nonInteractive", cwd=folder)

    def answers() -> None:
        urlopen(f"http://127.0.0.1:{web}/webhdfs/v1/?op=LISTSTATUS", timeout=5).close()

    def has_data_node() -> None:
        bean = "Hadoop:service=NameNode,name=FSNamesystemState"
        with urlopen(f"http://127.0.0.1:{web}/jmx?qry={bean}", timeout=5) as answer:
            if b'"NumLiveDataNodes" : 1' not in answer.read():
                raise RuntimeError("no data node has come up")

    with ExitStack() as nodes:
        for kind, is_ready in (("namenode.NameNode", answers), ("datanode.DataNode", has_data_node)):
            own = folder / kind
            own.mkdir()
            nodes.enter_context(running([*java, f"{node}.{kind}"], own, is_ready))
        yield Hdfs(name, web)


if __name__ == "__main__":
    try:
        install()
    except (RuntimeError, subprocess.CalledProcessError) as error:
        sys.exit(f"HDFS could not be installed: {error}")
