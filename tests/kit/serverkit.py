"""A cache server as a process whose log can be waited for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

SHM = Path("/dev/shm")
SIZE_GB = 0.01
PATIENCE = 30.0
"""Seconds to wait for what must come."""

MODULE = [sys.executable, "-m", "lmcache_kernels.adapters.server"]


class LoggedServer:
    """Attributes: ``url``, ``segment`` (the arena's file), ``process``."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._said: list[str] = []
        self._more = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url, self.segment = "", SHM

    def wait_ready(self) -> None:
        line = self.process.stdout.readline()
        ready = re.match(r"lmcache-kernels: serving (\S+) \(arena (\S+),", line)
        assert ready, self.log()
        self.url, self.segment = ready[1], SHM / ready[2]

    def _read(self) -> None:
        for line in self.process.stderr:
            with self._more:
                self._said.append(line)
                self._more.notify_all()
        with self._more:
            self._ended = True
            self._more.notify_all()

    def log(self) -> str:
        with self._more:
            return "".join(self._said)

    def wait_log(self, pattern: str, times: int = 1) -> re.Match[str]:
        """The match, once so many lines have one."""

        def found() -> list[re.Match[str]]:
            return [match for line in self._said if (match := re.search(pattern, line))]

        with self._more:
            self._more.wait_for(lambda: len(found()) >= times or self._ended, PATIENCE)
            matches = found()
        assert len(matches) >= times, f"{pattern!r} is not in the log:\n{self.log()}"
        return matches[times - 1]

    def close(self) -> None:
        """The process has ended: let go of its pipes."""
        self._reader.join(PATIENCE)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            pipe.close()

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """The exit status; the log is complete then."""
        status = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return status


@contextmanager
def logged_server(
    *arguments: str, environment: dict[str, str] | None = None, default_http: bool = False
):
    """Run ``python -m lmcache_kernels.adapters.server`` on a free port; killed if it still runs.

    Args:
        default_http: listen for HTTP where servers do by default, and not nowhere.
    """
    command = [*MODULE, "--port", "0", "--l1-size-gb", str(SIZE_GB)]
    command += [*(() if default_http else ("--http-port", "-1")), *arguments]
    process = subprocess.Popen(
        command,
        env=os.environ | (environment or {}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    server = LoggedServer(process)
    try:
        server.wait_ready()
        yield server
    finally:
        process.kill()
        process.wait()
        server.close()
