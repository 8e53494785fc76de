"""URLs of tiers: what each option may be, what a message says, and what it never shows."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_kernels.adapters.tiers import opening
from lmcache_kernels.adapters.tiers.files import FileSettings, FileTier
from lmcache_kernels.adapters.tiers.mooncake import MooncakeSettings, MooncakeTier
from lmcache_kernels.adapters.tiers.opening import SCHEMES, open_tier
from lmcache_kernels.adapters.tiers.settings import TierUrl
from lmcache_kernels.adapters.tiers.valkey import ValkeySettings, ValkeyTier
from lmcache_kernels.errors import ConfigError

DOCS = Path(__file__).resolve().parents[2] / "docs" / "tiers.md"
SECRET = "hunter2-do-not-show"


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    """As if all were installed: none of these tests uses one."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("file:///var/cache/lmk", FileTier),
        ("file:///var/cache/lmk?size_gb=0.5&fsync=1&threads=2", FileTier),
        ("valkey://localhost", ValkeyTier),
        ("valkey://user:p%40ss@[::1]:7000/3?prefix=a-b:/_&ttl_seconds=60", ValkeyTier),
        ("redis://:secret@10.0.0.1?cluster=1&timeout_seconds=0.5", ValkeyTier),
        ("rediss://host?tls_ca=/etc/ca.pem&tls_cert=/c&tls_key=/k", ValkeyTier),
        ("valkeys://host/", ValkeyTier),
        ("mooncake://master:50051?metadata=http://m:8080/metadata&protocol=rdma", MooncakeTier),
        ("mooncake://10.0.0.1?segment_gb=0&local_hostname=10.0.0.2&devices=mlx5_0", MooncakeTier),
    ],
)
def test_a_url_makes_the_tier_of_its_scheme_and_opens_nothing(url, kind):
    tier = open_tier(url)
    assert isinstance(tier, kind)
    tier.close()
    assert not Path("/var/cache/lmk").exists()


def test_what_is_not_given_is_as_the_settings_say():
    assert TierUrl.parse("file:///x").settings(FileSettings) == FileSettings(100.0, False, 4)
    given = TierUrl.parse("valkey://h?timeout_seconds=3&cluster=1").settings(ValkeySettings)
    assert given == ValkeySettings(timeout_seconds=3.0, cluster=True)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "without a scheme"),
        ("/var/cache", "without a scheme"),
        ("http://h", r"expected one of file://, valkey://, .*, got http://"),
        ("file://host/x", "got a host"),
        ("file:///", "expected file:///directory"),
        ("file:///x?size=3", "expected options among size_gb, fsync, threads; got size"),
        ("file:///x?size_gb=1&size_gb=2", "size_gb: expected once, got twice"),
        ("file:///x?size_gb=much", "size_gb: expected a number from .* got 'much'"),
        ("file:///x?size_gb=-1", "size_gb: expected a number"),
        ("file:///x?size_gb=nan", "size_gb: expected a number"),
        ("file:///x?size_gb=", "size_gb: expected a number"),
        ("file:///x?fsync=yes", "fsync: expected 0 or 1, got 'yes'"),
        ("file:///x?threads=1.5", "threads: expected an integer from 1 to 64"),
        ("file:///x?threads=65", "threads: expected an integer"),
        ("file:///x#y", "not shown"),
        ("valkey://", "expected a host, got none"),
        ("valkey://h/x", "expected a number behind the slash"),
        ("valkey://h:99999", "a port between"),
        ("valkey://h?prefix=a*b", "prefix: expected a text like"),
        ("valkey://h?prefix=", "prefix: expected a text like"),
        ("valkey://h/1?cluster=1", "expected database 0 of a cluster, got 1"),
        ("valkey://h?tls_ca=/x", "expected valkeys://"),
        ("valkeys://h?tls_cert=/x", "tls_cert and tls_key together"),
        ("valkey://h?timeout_seconds=0", "timeout_seconds: expected a number"),
        ("mooncake://", "expected mooncake://master-host"),
        ("mooncake://h/x", "expected mooncake://master-host"),
        ("mooncake://h?protocol=udp", "protocol: expected a text like tcp|rdma"),
        ("mooncake://h?timeout_seconds=20", "timeout_seconds: expected an integer from 1 to 10"),
        ("mooncake://h?prefix=a.b", "prefix: expected a text like"),
    ],
)
def test_what_is_wrong_is_named_with_what_would_be_right(url, message):
    with pytest.raises(ConfigError, match=message):
        open_tier(url)


@pytest.mark.parametrize(
    "url",
    [
        f"valkey://user:{SECRET}@h?nonsense=1",
        f"valkey://user:{SECRET}@h/x",
        f"valkey://user:{SECRET}@h:port",
        f"valkey://user:pa/{SECRET}@h",
        f"valkey://user:pa#{SECRET}@h",
        f"valkey://user:pa?{SECRET}@h",
        f"valkey://user:pa?{SECRET}=@h",
        f"valkey://user:{SECRET}@h?timeout_seconds=0",
        f"valkey://user:{SECRET}@",
        f"{SECRET}@h",
        f"user:{SECRET}@h",
        f"http://user:{SECRET}@h",
        f"mooncake://user:{SECRET}@h",
        f"file://user:{SECRET}@/x",
        f"valkey://h?password={SECRET}",
        f"valkey://h?{SECRET}",
    ],
)
def test_no_message_shows_a_password(url):
    with pytest.raises(ConfigError) as error:
        open_tier(url)
    assert SECRET not in str(error.value)
    assert error.value.__cause__ is None or SECRET not in str(error.value.__cause__)


def test_a_url_shows_itself_without_its_password():
    url = TierUrl.parse(f"valkey://me:{SECRET}@[::1]:7000/3?prefix=x")
    assert (url.user, url.password) == ("me", SECRET)
    assert str(url) == "valkey://[::1]:7000/3"
    assert SECRET not in repr(url)


@pytest.mark.parametrize(("url", "extra"), [("valkey://h", "tiers"), ("mooncake://h", "mooncake")])
def test_a_package_that_is_missing_is_named(url, extra, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape(f"pip install 'lmcache-kernels[{extra}]'")):
        open_tier(url)


def test_opening_loads_no_package_that_it_does_not_need():
    code = (
        "import sys; from lmcache_kernels.adapters.tiers.opening import open_tier;"
        "open_tier('file:///nowhere').close();"
        "sys.exit(len({'valkey', 'mooncake', 'torch', 'zmq'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_docs_name_every_scheme_and_every_option_with_its_default():
    text = DOCS.read_text()
    for scheme in SCHEMES:
        assert f"`{scheme}://" in text
    for options in (FileSettings, ValkeySettings, MooncakeSettings):
        for option in dataclasses.fields(options):
            default = int(option.default) if option.type == "bool" else option.default
            shown = f"{default:g}" if isinstance(default, (int, float)) else default or "none"
            assert re.search(rf"\| `{option.name}` \| `?{re.escape(shown)}`? \|", text), option.name


def test_every_scheme_has_a_tier_with_a_name():
    assert {make.__self__.name for make in opening.SCHEMES.values()} == {
        "files",
        "valkey",
        "mooncake",
    }
