"""Who may ask what."""

from __future__ import annotations

import pytest

from lmcache_kernels.adapters.admin.access import Access
from lmcache_kernels.errors import ConfigError

TOKEN = "correct horse battery staple"


def status(access, method="GET", path="/status", host="127.0.0.1:8080", **headers):
    refusal = access.refusal(method, path, {"host": host, **headers})
    return 200 if refusal is None else refusal.status


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "cache.example.org", ""])
def test_what_others_can_reach_needs_a_token(host):
    with pytest.raises(ConfigError, match="token"):
        Access(host, None)
    Access(host, TOKEN)


@pytest.mark.parametrize(
    "token", ["", "short", "x" * 15, "a token with\na new line", "t" * 20 + "é"]
)
def test_tokens_that_cannot_work_are_refused_and_not_told(token):
    with pytest.raises(ConfigError, match="admin token") as caught:
        Access("127.0.0.1", token)
    assert token == "" or token not in str(caught.value)


def test_on_loopback_reads_are_open_and_changes_need_the_token():
    access = Access("127.0.0.1", TOKEN)
    for method in ("GET", "HEAD"):
        assert status(access, method) == 200
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "get", "X"):
        assert status(access, method) == 401
        assert status(access, method, authorization=f"Bearer {TOKEN}") == 200


@pytest.mark.parametrize(
    "given",
    [
        *(
            "",
            TOKEN,
            "Bearer",
            "Bearer ",
            f"bearer {TOKEN}",
            f"Bearer {TOKEN} ",
            f"Bearer  {TOKEN}",
        ),
        *(
            f"Bearer {TOKEN[:-1]}",
            f"Bearer {TOKEN}x",
            f"Basic {TOKEN}",
            "Bearer \u00fcber",
            "x" * 9999,
        ),
    ],
)
def test_a_wrong_token_is_401_and_says_what_is_expected(given):
    refusal = Access("127.0.0.1", TOKEN).refusal(
        "POST", "/cache/clear", {"host": "localhost", "authorization": given}
    )
    assert (refusal.status, refusal.headers) == (401, {"www-authenticate": "Bearer"})
    assert TOKEN not in refusal.reason


def test_without_a_token_changes_are_off_and_the_answer_says_so():
    refusal = Access("localhost", None).refusal(
        "POST", "/cache/clear", {"host": "localhost", "authorization": f"Bearer {TOKEN}"}
    )
    assert refusal.status == 403
    assert "--admin-token-file" in refusal.reason


def test_elsewhere_reads_need_the_token_too_but_for_one_word():
    access = Access("0.0.0.0", TOKEN)
    assert status(access, host="cache.example.org") == 401
    assert status(access, host="cache.example.org", authorization=f"Bearer {TOKEN}") == 200
    assert status(access, path="/health", host="cache.example.org") == 200
    assert status(access, path="/ready", host="") == 200
    assert status(access, "POST", "/health", "cache.example.org") == 401
    assert status(access, path="/health/../status", host="cache.example.org") == 401


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:1", "127.0.0.1", "127.0.0.2:80", "[::1]", "[::1]:8080"]
)
def test_names_of_this_machine(host):
    assert status(Access("::1", None), host=host) == 200


@pytest.mark.parametrize(
    "host",
    [
        *(
            "",
            "evil.example.org",
            "evil.example.org:8080",
            "localhost.example.org",
            "127.0.0.1.nip.io",
        ),
        *(
            "[::1].example.org",
            "::1",
            "[::1]x",
            "localhost:80:80",
            "localhost:x",
            "10.0.0.1",
            "user@localhost",
            "localhost@evil.org",
            "[::1",
        ),
    ],
)
def test_other_names_for_this_machine_are_refused(host):
    """A page elsewhere whose name was made to point here."""
    access = Access("127.0.0.1", TOKEN)
    assert status(access, host=host) == 400
    assert status(access, "POST", host=host, authorization=f"Bearer {TOKEN}") == 400
