"""Processes that use each other and are killed at random, and what must hold afterwards."""

from __future__ import annotations

import os
import queue
import signal
import socket
import time
from collections import Counter, defaultdict
from contextlib import suppress

from chaos_members import KINDS, REAPED, Member, own_memory, segments, usage
from chaos_worker import BOUND, PROMPTS, ChaosWorker

from lmcache_kernels.errors import PeerGone

RECOVERY = 2 * BOUND
"""Seconds in which everybody works again: many times what it takes, and more than any call may."""

GROWTH = 1.05
SPARE = 4 << 20
"""What memory may grow by: so much of it, and so many bytes."""

MOST_EVENTS = 40
"""Of a round, before the first kill."""

LATE, LATER = (0.003, 0.02), 1.5
"""Seconds after an event, one bound or the other, or after a start, in which somebody is killed."""


def _turn(victim):
    return list(KINDS).index(victim[0])


class ViolationError(AssertionError):
    """Something that must never be."""


class Fleet:
    """All of them, and a worker in this process that outlives them.

    Args:
        chance: a random.Random that decides who is killed and when.
        directory: for what is to outlive everybody.

    Attributes:
        counts: by who, call and outcome, of all calls so far.
        slowest: seconds, by call, and of a recovery.
    """

    def __init__(self, chance, directory):
        self.chance, self.directory = chance, directory
        self.events = queue.Queue()
        self.counts = Counter()
        self.slowest = defaultdict(float)
        self.port, self.tier_port = _free_port(chance), _free_port(chance)
        self.url = f"tcp://127.0.0.1:{self.port}"
        self.members = {}
        self._traces = set()  # that those who were killed may have left
        self._deaths = []  # when, and what a server remembers of it
        self._usage = {}
        self._known = None  # incarnation of the last server
        self._auditor = ChaosWorker(self.url, instance=1, mode="engine_driven", seed=0)

    def __enter__(self):
        try:
            for kind, what in KINDS.items():
                for number in range(what.count):
                    self._start(kind, number)
            self._wait_recovered(self.members.values())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for member in self.members.values():
            member.kill()
        self._auditor.close()

    def stop(self):
        """Let all of them end by themselves, the server last; nothing is left behind."""
        while self.members:
            _, member = self.members.popitem()
            self._check_log(member, member.stop())
        self._check_leftovers()

    def round(self):
        """Kill somebody at random, start them again, and check everything; who it was."""
        victims = self._draw_victims()
        self._wait_somewhere(victims[0])
        for victim in victims:
            self._kill_after(self.chance.uniform(0.0, self.chance.choice(LATE)), victim)
        self._wait_recovered([self._start_again(*victim) for victim in sorted(victims, key=_turn)])
        self._audit()
        self._check_leftovers()
        self._check_usage()
        return victims

    # --- events -----------------------------------------------------------------------------------

    def _take_event(self, timeout):
        """Note the next one; None: none came in that time."""
        try:
            member, event = self.events.get(timeout=max(0.0, timeout))
        except queue.Empty:
            return None
        member.note(event)
        self._note(member, event)
        return member, event

    def _note(self, who, event):
        if "violation" in event:
            raise ViolationError(f"{who}: {event}")
        if "call" in event:
            kind = getattr(who, "kind", who)
            outcome = "failed" if "error" in event else "chunks"
            self.counts[kind, event["call"], outcome] += event.get("chunks", 1)
            self.slowest[event["call"]] = max(self.slowest[event["call"]], event["seconds"])

    def _wait_until(self, condition, members, give_up_at):
        """Until it is true of all of them."""
        while left := [member for member in members if not condition(member)]:
            if time.monotonic() > give_up_at:
                raise ViolationError(f"not working again after {RECOVERY} s: {left}")
            self._take_event(1.0)

    def _wait_recovered(self, started):
        """Until those that were started serve, and every worker transfers with the server there is."""
        began = time.monotonic()
        give_up_at = began + RECOVERY
        services = [member for member in started if KINDS[member.kind].serves]
        self._wait_until(lambda member: member.serves, services, give_up_at)
        another = any(member.kind == "server" for member in started)
        server = self._find_server(another, give_up_at)
        workers = [one for one in self.members.values() if not KINDS[one.kind].serves]
        self._wait_until(lambda member: member.transferred_with == server, workers, give_up_at)
        self.slowest["recovery"] = max(self.slowest["recovery"], time.monotonic() - began)

    # --- killing ----------------------------------------------------------------------------------

    def _draw_victims(self):
        """One, now and then two."""
        kinds = self.chance.choices(list(KINDS), [one.weight for one in KINDS.values()], k=2)
        found = [(kind, self.chance.randrange(KINDS[kind].count)) for kind in kinds]
        return list(dict.fromkeys(found))[: self.chance.choice((1, 1, 1, 2))]

    def _wait_somewhere(self, victim):
        """Until some event, or until the victim, or a worker if that is a server, begins something."""
        for _ in range(self.events.qsize() + self.chance.randrange(MOST_EVENTS)):
            self._take_event(BOUND)
        begins = self.chance.choice((None, "load", "store", "store"))
        give_up_at = time.monotonic() + BOUND
        while begins and time.monotonic() < give_up_at:
            member, event = self._take_event(BOUND) or (None, {})
            if event.get("begins") == begins and (
                member is self.members[victim] or KINDS[victim[0]].serves
            ):
                return

    def _kill_after(self, seconds, victim):
        at = time.monotonic() + seconds
        while (left := at - time.monotonic()) > 0:
            self._take_event(left)
        member = self.members[victim]
        self._traces |= segments(member.pid) | KINDS[member.kind].traces(self)
        self._check_log(member, member.kill())
        self._deaths.append((time.monotonic(), KINDS[member.kind].remembered))

    def _start_again(self, *victim):
        """Now and then the new one is killed as it starts, and another one comes."""
        while self.chance.random() < 0.2:
            self._start(*victim)
            self._kill_after(self.chance.uniform(0.0, LATER), victim)
        return self._start(*victim)

    def _start(self, kind, number):
        member = self.members[kind, number] = Member(self, kind, number)
        return member

    # --- what must hold ---------------------------------------------------------------------------

    def _audit(self):
        """Whatever a lookup offers is read back, to the bit, with the workers stopped wherever they are."""
        for pid in self._worker_pids():
            os.kill(pid, signal.SIGSTOP)
        for number in range(PROMPTS):
            for event in self._auditor.read(self._auditor.prompts.digests(number)):
                self._note("auditor", event)
        for pid in self._worker_pids():
            os.kill(pid, signal.SIGCONT)

    def _check_leftovers(self):
        """Nothing of the dead is there any more."""
        living = segments(os.getpid()).union(*(segments(one.pid) for one in self.members.values()))
        self._traces = {path for path in self._traces - living if path.exists()}
        if self._traces:
            raise ViolationError(f"left behind: {self._traces}")

    def _check_usage(self):
        """What those have that live on does not grow: memory, open files, threads, mapped arenas."""
        reaped = time.monotonic() - REAPED - RECOVERY
        self._deaths = [one for one in self._deaths if one[0] > reaped]
        remembered = sum(count for _, count in self._deaths)
        self._check_growth("auditor", os.getpid(), more=KINDS["engine-driven worker"].busy)
        for member in self.members.values():
            kind = KINDS[member.kind]
            if kind.ours:
                more = kind.busy + (remembered if kind.serves else 0)
                self._check_growth(member, member.pid, more=more)
        for pid in (os.getpid(), *self._worker_pids()):
            if len(segments(pid)) > 1:
                raise ViolationError(f"{pid} has mapped {segments(pid)}")

    def _check_growth(self, who, pid, *, more):
        now = (own_memory(pid), *usage(pid))
        memory, files, threads = self._usage.setdefault(who, now)
        if now[0] > GROWTH * memory + SPARE or max(now[1] - files, now[2] - threads) > more:
            raise ViolationError(f"{who}: {now}, before {(memory, files, threads)}")

    def _worker_pids(self):
        return [one.pid for one in self.members.values() if not KINDS[one.kind].serves]

    def _check_log(self, member, complaints):
        if complaints:
            raise ViolationError(f"{member} has logged:\n{complaints}")

    def _find_server(self, another, give_up_at):
        """The incarnation of the server that there is; ``another``: not the last one."""
        while (found := self._auditor.incarnation) is None or (another and found == self._known):
            if time.monotonic() > give_up_at:
                raise ViolationError("no server was found")
            with suppress(PeerGone):
                self._auditor.wait_ready(0.1)
        self._known = found
        return found


def _free_port(chance):
    """Of those that the kernel gives to nobody who does not ask for it, also while its server is dead."""
    while True:
        port = chance.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
