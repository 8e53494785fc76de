"""Servers, workers and what keeps chunks for them killed at random, round after round, while all of them work."""

from __future__ import annotations

import logging
import random
from collections import Counter

import pytest
from chaos_fleet import Fleet
from chaos_members import KINDS, REDIS

logger = logging.getLogger(__name__)


@pytest.mark.timeout(900)
def test_whoever_is_killed_what_a_lookup_offers_is_right_and_nobody_waits(
    seed, rounds, tmp_path, require_services
):
    """After each round everybody works again, what is offered reads back to the bit, nothing is left
    behind, and nobody has more files, threads or memory than before."""
    assert REDIS or not require_services, (
        "needs redis-server or valkey-server, and the package valkey"
    )
    killed = Counter()
    with Fleet(random.Random(seed), tmp_path) as fleet:
        for number in range(rounds):
            victims = fleet.round()
            logger.info("round %d of seed %d: killed %s", number, seed, victims)
            killed.update(kind for kind, _ in victims)
        fleet.stop()
    logger.info("killed %s; seconds of the slowest calls %s", dict(killed), dict(fleet.slowest))
    logger.info("%s", dict(fleet.counts))
    for kind, what in KINDS.items():
        if not what.serves:
            assert fleet.counts[kind, "store", "chunks"]
            assert fleet.counts[kind, "load", "chunks"]
    assert fleet.counts["auditor", "load", "chunks"]
