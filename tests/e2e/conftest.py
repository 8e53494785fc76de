"""Real vLLM engines in their own virtual environment."""

from __future__ import annotations

import os
import subprocess

import pytest
from e2ekit import CHUNK, E2E, Engine


@pytest.fixture(scope="session")
def vllm_python():
    python = os.environ.get("LMCACHE_KERNELS_VLLM_PYTHON")
    if not python:
        pytest.skip("LMCACHE_KERNELS_VLLM_PYTHON does not name a Python with vLLM")
    return python


@pytest.fixture(scope="session")
def models(vllm_python, tmp_path_factory):
    """Folder with the checkpoints ``llama``, ``windowed`` and ``sliding``."""
    folder = tmp_path_factory.mktemp("models")
    script = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]);"
        "import tiny_models as t; out = Path(sys.argv[2]);"
        "[t.write_model(out / n.lower(), getattr(t, n)) for n in ('LLAMA', 'WINDOWED', 'SLIDING')]"
    )
    subprocess.run([vllm_python, "-c", script, str(E2E), str(folder)], check=True, timeout=120)
    return folder


@pytest.fixture
def engines(vllm_python, tmp_path):
    """Start engines; the test ends with every one of them stopped and whole."""
    started = []

    def start(
        model,
        server_url=None,
        *,
        llm=None,
        environment=None,
        by_name=False,
        policy="recompute",
        **extra,
    ):
        connector = None
        if server_url is not None:
            host, _, port = server_url.rpartition(":")
            connector = {
                "kv_connector": "LMCacheKernelsConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": policy,
                "kv_connector_extra_config": {
                    "lmcache.mp.host": host,
                    "lmcache.mp.port": int(port),
                    "lmcache.mp.chunk_size": CHUNK,
                    **{f"lmcache.mp.{key}": value for key, value in extra.items()},
                },
            }
            if not by_name:
                connector["kv_connector_module_path"] = "lmcache_kernels.adapters.vllm.connector"
        engine = Engine(
            vllm_python,
            tmp_path / f"engine-{len(started)}.log",
            {"llm": {"model": str(model), **(llm or {})}, "connector": connector},
            environment or {},
        )
        started.append(engine)
        return engine

    yield start
    for engine in started:
        assert engine.close() == 0
