"""The names this project promises, package by package; a change here belongs in the changelog."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
from import_graph import ROOT, sources

PUBLIC = {
    "lmcache_kernels": [
        "CacheGroup",
        "KVTransferError",
        "LayoutError",
        "Plane",
        "__version__",
        "blocked_group_of",
        "copy_blocks",
        "group_of",
        "opaque_group_of",
        "plane_of",
    ],
    "lmcache_kernels.transfer": [
        "ChunkChain",
        "EmbeddedCache",
        "EngineDrivenContext",
        "Observer",
        "PeerCopy",
        "PeerTarget",
        "TransferEvent",
        "create_transfer_context",
        "open_kv_caches",
        "root_digest",
        "shard_id",
        "wrap_kv_caches",
    ],
}
MOST_NAMES = 12

PACKAGES = [name for name, path in sources().items() if path.name == "__init__.py"]


@pytest.mark.parametrize("name", PACKAGES)
def test_public_names_are_those_promised(name):
    names = getattr(importlib.import_module(name), "__all__", [])
    assert sorted(names) == PUBLIC.get(name, [])
    assert len(names) <= MOST_NAMES


@pytest.mark.parametrize(
    ("package", "name"), [(p, n) for p, names in PUBLIC.items() for n in names]
)
def test_every_public_name_exists_and_is_documented(package, name):
    value = getattr(importlib.import_module(package), name)
    assert isinstance(value, str) or value.__doc__


@pytest.mark.parametrize("name", PUBLIC)
def test_an_unknown_name_is_an_attribute_error(name):
    package = importlib.import_module(name)
    with pytest.raises(AttributeError, match="no attribute 'copy_block'"):
        package.copy_block  # noqa: B018


def test_public_names_have_the_types_that_users_rely_on():
    """mypy checks ``typing/api.py`` as a user's code would be checked, lazily loaded names too."""
    pytest.importorskip("mypy", reason="needs mypy (the dev extra)")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "tests/typing/api.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
