"""How much chaos: a little by default, 200 rounds of it with ``--full``."""

from __future__ import annotations


def pytest_generate_tests(metafunc):
    if {"seed", "rounds"} <= set(metafunc.fixturenames):
        full = metafunc.config.getoption("--full")
        metafunc.parametrize("rounds", [20 if full else 10])
        metafunc.parametrize("seed", range(10) if full else [1])
