"""SFTP: asyncssh."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncssh

from tests.servers.credentials import SECRET, USER


class _Login(asyncssh.SSHServer):
    def password_auth_supported(self) -> bool:
        return True

    def validate_password(self, username: str, password: str) -> bool:
        return (username, password) == (USER, SECRET)


@contextmanager
def sftp_server(root: Path) -> Iterator[str]:
    """Serves ``root`` on a free port of the loopback interface, and gives the URL."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    listening = asyncssh.listen(
        "127.0.0.1",
        0,
        server_factory=_Login,
        server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
        sftp_factory=lambda channel: asyncssh.SFTPServer(channel, chroot=str(root)),
    )

    async def start() -> asyncssh.SSHAcceptor:
        return await listening

    async def stop() -> None:
        acceptor.close()
        await acceptor.wait_closed()
        served = asyncio.all_tasks() - {asyncio.current_task()}  # clients that are still connected
        for task in served:
            task.cancel()
        await asyncio.gather(*served, return_exceptions=True)

    acceptor = asyncio.run_coroutine_threadsafe(start(), loop).result(timeout=30)
    try:
        yield f"sftp://{USER}:{SECRET}@127.0.0.1:{acceptor.get_port()}"
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(timeout=30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=5)
        loop.close()
