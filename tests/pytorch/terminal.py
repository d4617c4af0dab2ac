"""A terminal to write to, and what can be seen on it."""

import codecs
import fcntl
import os
import pty
import re
import struct
import termios
import threading
import time
from typing import TextIO


class Terminal:
    """A pseudo-terminal, and the screen that it would show; it knows what progress bars make use of.

    Attributes:
        stream: To write to.
    """

    _CONTROL = re.compile(r"\x1b\[\??([\d;]*)([A-Za-z])")

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
        self.stream: TextIO = os.fdopen(slave, "w", buffering=1)
        self._rows: list[str] = [""]
        self._row = self._column = 0
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def lines(self) -> list[str]:
        """What can be seen of what arrived, without empty lines."""
        with self._lock:
            return [row.rstrip() for row in self._rows if row.strip()]

    def wait_for(self, text: str, seconds: float = 20) -> list[str]:
        """The lines once one of them contains ``text``."""
        end = time.monotonic() + seconds
        while True:
            lines = self.lines()
            if any(text in line for line in lines):
                return lines
            assert time.monotonic() < end, f"there is no {text!r} in {lines}"
            time.sleep(0.01)

    def close(self) -> None:
        """Returns when all that was written has arrived."""
        if not self.stream.closed:
            self.stream.close()
            self._reader.join()
            os.close(self._master)

    def _read(self) -> None:
        decoder, text = codecs.getincrementaldecoder("utf-8")(), ""
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:  # how Linux says that the other end is closed
                return
            with self._lock:
                text = self._show(text + decoder.decode(data))

    def _show(self, text: str) -> str:
        """Returns what is not complete."""
        at = 0
        while at < len(text):
            if text[at] == "\x1b":
                control = self._CONTROL.match(text, at)
                if control is None:
                    return text[at:]
                self._move(control[1], control[2])
                at = control.end()
                continue
            self._put(text[at])
            at += 1
        return ""

    def _put(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._row += 1
            self._rows += [""] * (self._row + 1 - len(self._rows))
        elif character.isprintable():
            row = self._rows[self._row].ljust(self._column)
            self._rows[self._row] = row[: self._column] + character + row[self._column + 1 :]
            self._column += 1

    def _move(self, number: str, what: str) -> None:
        if what == "A":
            self._row = max(0, self._row - int(number or 1))
        elif what == "K":
            row = self._rows[self._row]
            self._rows[self._row] = "" if number == "2" else row[: self._column]
