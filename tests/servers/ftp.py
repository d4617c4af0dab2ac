"""FTP: pyftpdlib."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyftpdlib.authorizers import DummyAuthorizer
from pyftpdlib.handlers import FTPHandler
from pyftpdlib.servers import FTPServer

from tests.servers.credentials import SECRET, USER


@contextmanager
def ftp_server(root: Path) -> Iterator[str]:
    """Serves ``root`` on a free port of the loopback interface, and gives the URL."""
    logging.getLogger("pyftpdlib").setLevel(logging.ERROR)
    authorizer = DummyAuthorizer()
    authorizer.add_user(USER, SECRET, str(root), perm="elradfmwMT")
    handler = type("Handler", (FTPHandler,), {"authorizer": authorizer})
    running = FTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=running.serve_forever, kwargs={"timeout": 0.05, "handle_exit": False}, daemon=True)
    thread.start()
    try:
        yield f"ftp://{USER}:{SECRET}@127.0.0.1:{running.address[1]}"
    finally:
        running.ioloop.call_later(0, running.close_all)
        thread.join(timeout=5)
