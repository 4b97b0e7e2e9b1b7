"""Stopping when asked, between steps."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

logger = logging.getLogger(__name__)

# Ctrl-C, the system's and a closed terminal's requests, notices of schedulers before they take a machine back, and
# the end of the allowed CPU time. Not all of them are there on every system.
NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
STOPS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))
NOTICE = "finishing this step first; press again to stop at once, without saving"
BROKEN_PIPE = 13  # SIGPIPE, as which the loss of the output counts


class StopSignals:
    """Signals ask for a clean stop after the current step; a second one ends at once.

    `say` is called at the first one with what happens now, from a thread of its own, as the main one may be busy for
    seconds. Signals that were ignored when the command began, as under nohup, stay ignored.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.say: Callable[[str], None] = logger.warning
        self._before: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        return self.number is not None

    def ask(self, number: int) -> None:
        """Ask for a stop as if the signal had come."""
        if self.number is None:
            self.number = number

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            return self  # only the main thread can be told of signals
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._announce, name="meristem-signals", daemon=True).start()
        for number in STOPS:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._write)  # ends the thread

    def _announce(self) -> None:
        """Wait for signals, which the system writes here at once, and say what happens at the first one.

        A second one that comes before the main thread has even noticed the first would be lost on it: both are one to
        Python. It ends the process here.
        """
        said = False
        for (number,) in iter(lambda: os.read(self._read, 1), b""):
            if number not in self._before:
                continue
            if said and not self.asked:
                os._exit(128 + number)
            if not said:
                said = True
                with suppress(Exception):  # nobody may be left to hear it
                    self.say(NOTICE)
        os.close(self._read)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.number = number
