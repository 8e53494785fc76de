"""Bringing chunks up from tiers because somebody over HTTP wants them in the arena soon."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from starlette.exceptions import HTTPException
from starlette.routing import Route

from lmcache_kernels.transfer.messages import Done, EndSession, Found, Lookup

from .asking import asked, json_response, name_of
from .body import body_of

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from .snapshot import Loop

TURN = 30.0
"""Seconds of one lookup; as long as each finds more than the one before there is another."""

AT_ONCE = 0.2
"""Seconds in which it shows whether a request can be served at all."""

MOST_RUNNING = 16
MOST_REMEMBERED = 256
"""Jobs whose end can still be asked for."""

RUNNING, DONE, CANCELLED, FAILED = "running", "done", "cancelled", "failed"


class PrefetchBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shards and digests in hexadecimal; see :class:`~lmcache_kernels.transfer.messages.Lookup`."""

    shards: list[str]
    digests: list[str]


@dataclass(eq=False)
class _Job:
    name: str
    lookup: Lookup
    chunks: int
    found: int = 0
    state: str = RUNNING
    error: HTTPException | None = None
    task: asyncio.Task[None] | None = None

    def told(self) -> dict[str, object]:
        return {
            "prefetch": self.name,
            "state": self.state,
            "chunks": self.chunks,
            "found": self.found,
        }


class Prefetches:
    """Jobs, each a lookup that nobody makes use of. For the HTTP server's event loop.

    Args:
        loop: of the cache server.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._jobs: dict[str, _Job] = {}

    def routes(self) -> list[Route]:
        return [
            Route("/cache/prefetches", self.begin, methods=["POST"]),
            Route("/cache/prefetches/{name}", self.look, methods=["GET"]),
            Route("/cache/prefetches/{name}", self.cancel, methods=["DELETE"]),
        ]

    async def begin(self, request: Request) -> Response:
        """202 and the job; how it goes on is for :meth:`look`."""
        body = await body_of(request, PrefetchBody)
        if sum(job.state == RUNNING for job in self._jobs.values()) >= MOST_RUNNING:
            raise HTTPException(503, f"{MOST_RUNNING} prefetches are running: wait for some")
        name = secrets.token_hex(8)
        lookup = Lookup(
            request=f"prefetch {name}",
            shards=[name_of("shards", shard) for shard in body.shards],
            digests=b"".join([name_of("digests", digest) for digest in body.digests]),
        )
        job = self._jobs[name] = _Job(name, lookup, len(body.digests))
        while len(self._jobs) > MOST_REMEMBERED:
            del self._jobs[next(one for one, it in self._jobs.items() if it.state != RUNNING)]
        job.task = asyncio.create_task(self._run(job))
        await asyncio.wait({job.task}, timeout=AT_ONCE)
        if job.error is not None:
            del self._jobs[name]
            raise job.error
        return json_response(job.told(), 202)

    async def look(self, request: Request) -> Response:
        return json_response(self._job(request).told())

    async def cancel(self, request: Request) -> Response:
        """What is on its way arrives all the same; nothing more is begun."""
        job = self._job(request)
        if job.state == RUNNING:
            job.state = CANCELLED
            await self._end(job)
        return json_response(job.told())

    async def _run(self, job: _Job) -> None:
        try:
            while job.state == RUNNING:
                found = (await asked(self._loop, job.lookup, Found, TURN)).chunks
                if job.state == RUNNING:
                    grew, job.found = found > job.found, found
                    if found >= job.chunks or not grew:
                        job.state = DONE
            await self._end(job)
        except HTTPException as error:
            job.state, job.error = FAILED, error

    async def _end(self, job: _Job) -> None:
        """Nobody wants its chunks for themselves."""
        await asked(self._loop, EndSession(request=job.lookup.request), Done)

    def _job(self, request: Request) -> _Job:
        job = self._jobs.get(request.path_params["name"])
        if job is None:
            raise HTTPException(404, "no such prefetch, or it ended long ago")
        return job
