"""What the demo's child processes have in common."""

import logging
import os
import re
import signal
import threading
import warnings

#: Hints from inside Lightning and PyTorch on which no user can act, and one on a choice that the demo makes.
HINTS = (
    "Starting from v1.9.0, `tensorboardX` has been removed",
    "`isinstance(treespec, LeafSpec)` is deprecated",
    "Please use DTensor instead and we are deprecating ShardedTensor",
    "`_get_pg_default_device` will be deprecated",
    "Multiple backends are registered with this ProcessGroup",
    "`load_state_dict` is deprecated and will be removed",
)


def follow_parent() -> None:
    """Ends this process and its process group as soon as the demo's main process is gone, even if it was killed.

    Started by someone else, who may share the process group, it does nothing.
    """
    if "LIGHTNING_IO_DEMO" not in os.environ:
        return

    def wait() -> None:
        while os.read(0, 1):  # standard input: the demo never writes to it, and it ends with the demo
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def be_quiet() -> None:
    """Silences notes on how other set-ups would differ; warnings are shown, but for those that no user can act on."""
    logging.disable(logging.INFO)
    for hint in HINTS:
        warnings.filterwarnings("ignore", message=re.escape(hint))
