"""A real vLLM engine in its own process and virtual environment."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from pathlib import Path

import pytest

E2E = Path(__file__).parents[1] / "e2e"
ENGINE_TIMEOUT = 240.0
CHUNK = 64

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def prompt(length, seed=0):
    return [(i * 7919 + 13 + seed * 101) % 500 + 3 for i in range(length)]


class Engine:
    """One engine process; commands go in as lines of JSON, results come back the same way."""

    def __init__(self, python, log, settings, environment):
        self._log = log
        self._errors = log.open("w")
        self._process = subprocess.Popen(
            [python, str(E2E / "engine.py"), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **ENVIRONMENT, **environment},
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        os.set_blocking(self._process.stdout.fileno(), False)
        self._buffer = b""
        self._result()

    def generate(self, prompts, *, max_tokens=8, **command):
        answers = self._do(do="generate", prompts=prompts, max_tokens=max_tokens, **command)
        return answers["answers"]

    def reset(self):
        """Empty the engine's own prefix cache; ours keeps what it has."""
        assert self._do(do="reset")["reset"]

    def pool(self):
        """Free and total blocks once nothing is running."""
        return self._do(do="free_blocks")

    def log(self):
        return self._log.read_text()

    def _do(self, **command):
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        return self._result()

    def _result(self):
        deadline = time.monotonic() + ENGINE_TIMEOUT
        while True:
            while b"\n" in self._buffer:
                line, self._buffer = self._buffer.split(b"\n", 1)
                if line.startswith(b"RESULT "):
                    return json.loads(line[7:])
            left = deadline - time.monotonic()
            if left <= 0 or not self._selector.select(left):
                pytest.fail(f"the engine did not answer in {ENGINE_TIMEOUT} s\n{self._tail()}")
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                pytest.fail(f"the engine died\n{self._tail()}")
            self._buffer += data

    def _tail(self):
        return self._log.read_text()[-4000:]

    def close(self):
        """End the process in order; returns its exit code."""
        if self._process.poll() is None:
            self._process.stdin.write(b'{"do": "stop"}\n')
            self._process.stdin.close()
        try:
            return self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        finally:
            self._process.stdout.close()
            self._selector.close()
            self._errors.close()
