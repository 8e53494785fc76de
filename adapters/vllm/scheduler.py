"""The scheduler's half of the connector: what is stored where, what to load, what to store, which
stores to fence. Never blocks, never waits, knows nothing of tensors.

Blocks are never held back for a store: they are freed as soon as the engine likes, and if one of
them is handed out again while a store still reads it, the step that may overwrite it is told to
wait for that store's gather. So there is no sequence of hooks that frees a block twice or never.
"""

from __future__ import annotations

import logging
import math
import secrets
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any

from lmcache_kernels.errors import KVTransferError
from lmcache_kernels.ids import ABSENT
from lmcache_kernels.transfer.keys import ChunkChain, Span, root_digest
from lmcache_kernels.transfer.messages import Clear, EndSession, Found, Lookup

from .jobs import LoadJob, StepJobs, StepReport, StoreJob
from .running import RunningJobs
from .tenant import salt_for_digests, tenant_of
from .tracker import (
    GroupShape,
    RequestTracker,
    chunks_allocated,
    fails_whole,
    matched_tokens,
    slice_blocks,
    storable_chunks,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lmcache_kernels.transfer.port import CachePort

    from .config import ConnectorConfig
    from .running import RunningJob

logger = logging.getLogger(__name__)

DECODED_TOKENS = 8
"""Of one request in one step: with no more it is behind its prompt, speculation included."""

RESET_TIMEOUT = 2.0
"""Seconds the engine's cache reset waits for the server."""


class SchedulerSide:
    """See the module. Arguments named ``request`` and ``output`` are the engine's own objects.

    Args:
        config: the connector's settings.
        port: the cache.
        model: name of the weights; ``kv_dtype``: of the cache.
        groups: how each KV-cache group pages its tokens.
        workers: how many workers report each job.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        port: CachePort,
        *,
        model: str,
        kv_dtype: str,
        groups: Sequence[GroupShape],
        workers: int,
    ) -> None:
        self._config = config
        self._port = port
        self._model = model
        self._kv_dtype = kv_dtype
        self._groups = tuple(groups)
        # The engine takes the failure of a whole request for asynchronous loads alone.
        self._load_async = config.load_async or fails_whole(self._groups)
        self._alignment = (
            1 if len(self._groups) == 1 else math.lcm(*(g.block_tokens for g in self._groups))
        )
        self.shards: list[bytes] = []
        # Request ids may be long, and other engines at the server have requests of the same id.
        self._name = secrets.token_hex(8)
        self._sessions = 0
        self._trackers: dict[str, RequestTracker] = {}
        self._step = StepJobs()
        self._running = RunningJobs(workers)

    # --- matching ---------------------------------------------------------------------------------

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond ``local_tokens`` are stored; (None, False): ask again next step."""
        tracker = self._trackers.get(request.request_id)
        if tracker is None:
            tracker = self._track(request)
            if tracker is None:
                return 0, False
        if tracker.admitted and request.status.name == "PREEMPTED":
            self._end_session(tracker)
            tracker.restart()
        tracker.local_tokens = local_tokens
        if tracker.load_failed:
            return 0, False
        if tracker.stores:
            # What it has just stored is about to be found; and until its gathers are over, its old
            # blocks must not be taken for free.
            return None, False
        if tracker.hit_chunks is None:
            hit = self._poll_lookup(tracker)
            if hit is None:
                return None, False
            tracker.hit_chunks = tracker.stored_chunks = hit
        found = matched_tokens(
            tracker.hit_chunks, self._config.chunk_size, request.num_tokens, self._alignment
        )
        external = max(0, found - local_tokens)
        return external, self._load_async and external > 0

    def _track(self, request: Any) -> RequestTracker | None:
        if getattr(request, "prompt_embeds", None) is not None or not request.prompt_token_ids:
            return None  # without token ids there is nothing to name the chunks by
        adapter = getattr(request, "lora_request", None)
        salt = getattr(request, "cache_salt", None) or ""
        root = root_digest(
            model=self._model,
            chunk_tokens=self._config.chunk_size,
            adapter=f"{adapter.lora_name}\n{adapter.lora_path}" if adapter else "",
            salt=salt_for_digests(salt),
            dtype=self._kv_dtype,
        )
        spans = [
            Span(item.identifier, item.mm_position.offset, item.mm_position.length)
            for item in getattr(request, "mm_features", None) or ()
        ]
        self._sessions += 1
        tracker = RequestTracker(
            session=f"{self._name}-{self._sessions}",
            chain=ChunkChain(root, self._config.chunk_size, spans),
            tokens=request.all_token_ids,
            prompt_chunks=len(request.prompt_token_ids) // self._config.chunk_size,
            tenant=tenant_of(salt),
        )
        self._trackers[request.request_id] = tracker
        return tracker

    def _poll_lookup(self, tracker: RequestTracker) -> int | None:
        """Chunks found, 0 for any failure, None while the answer is on its way."""
        if tracker.lookup is None:
            if not self.shards or len(tracker.tokens) < self._config.chunk_size:
                return 0
            digests = tracker.chain.extend(tracker.tokens)
            tracker.leased = True
            tracker.lookup = self._port.request(
                Lookup(request=tracker.session, shards=self.shards, digests=b"".join(digests)),
                self._config.lookup_timeout,
            )
        if not tracker.lookup.done():
            return None
        try:
            reply = tracker.lookup.result()
        except KVTransferError as error:
            logger.debug("lookup failed, taken as a miss: %s", error)
            return 0
        return reply.chunks if isinstance(reply, Found) else 0

    # --- allocation -------------------------------------------------------------------------------

    def allocated(
        self, request_id: str, block_ids: Sequence[Sequence[int]], external_tokens: int
    ) -> None:
        """The engine gave the request its blocks; ``external_tokens`` of them we must fill."""
        tracker = self._trackers.get(request_id)
        local_tokens = tracker.local_tokens if tracker is not None else 0
        for ids, group in zip(block_ids, self._groups, strict=True):
            # Blocks found in the engine's own cache are shared, not handed out again.
            self._fence_reuse(ids[local_tokens // group.block_tokens :])
        if tracker is None:
            if external_tokens > 0:
                self.refuse_load(request_id, block_ids)
            return
        tracker.admitted = True
        tracker.block_ids = [list(ids) for ids in block_ids]
        if external_tokens <= 0:
            self._end_session(tracker)
            return
        self._order_load(request_id, tracker, external_tokens)

    def refuse_load(self, request_id: str, block_ids: Sequence[Sequence[int]]) -> None:
        """We promised tokens and cannot order their load: have the workers report it as failed."""
        tracker = self._trackers.get(request_id)
        self._step.loads.append(
            LoadJob(
                job_id=self._running.start(request_id),
                request_id=request_id,
                digests=[],
                block_ids=[list(ids) for ids in block_ids],
                skip_tokens=tracker.local_tokens if tracker is not None else 0,
                synchronous=not self._load_async,
            )
        )

    def _order_load(self, request_id: str, tracker: RequestTracker, tokens: int) -> None:
        size = self._config.chunk_size
        first = tracker.local_tokens // size
        last = -(-(tracker.local_tokens + tokens) // size)
        blocks = slice_blocks(tracker.block_ids, self._groups, size, first, last)
        for ids, group in zip(blocks, self._groups, strict=True):
            if group.window is not None:
                ids[:] = [ABSENT if block == 0 else block for block in ids]
            # What is taken of the last chunk may end before the chunk does.
            ids += [ABSENT] * ((last - first) * size // group.block_tokens - len(ids))
        synchronous = not self._load_async
        filled = (block for ids in blocks for block in ids) if synchronous else ()
        tracker.load = self._running.start(request_id, fills=filled)
        self._step.loads.append(
            LoadJob(
                job_id=tracker.load,
                request_id=request_id,
                digests=tracker.chain.digests[first:last],
                block_ids=blocks,
                skip_tokens=tracker.local_tokens - first * size,
                synchronous=synchronous,
            )
        )

    def _fence_reuse(self, block_ids: Iterable[int]) -> None:
        self._step.fence += self._running.reading(block_ids)

    # --- steps ------------------------------------------------------------------------------------

    def build_step(self, output: Any) -> StepJobs:
        """Orders for the step that ``output`` describes; called once for each step."""
        cached = output.scheduled_cached_reqs
        # Fences and loads come first: they must be in the orders whatever happens below.
        for new_ids in cached.new_block_ids:
            for ids in new_ids or ():
                self._fence_reuse(ids)
        for request_id in output.preempted_req_ids or ():
            tracker = self._trackers.get(request_id)
            if tracker is not None:
                self._step.fence += tracker.stores
        rows = [
            (new.req_id, new.block_ids, True, new.num_computed_tokens)
            for new in output.scheduled_new_reqs
        ]
        rows += [
            (request_id, new_ids, request_id in cached.resumed_req_ids, computed)
            for request_id, new_ids, computed in zip(
                cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
            )
        ]
        for request_id, block_ids, whole_table, computed in rows:
            tracker = self._trackers.get(request_id)
            if tracker is None:
                continue
            try:
                tracker.take_blocks(block_ids, whole_table)
                self._advance(
                    request_id, tracker, computed, output.num_scheduled_tokens[request_id]
                )
            except Exception:
                logger.exception("request %s: nothing more of it is stored", request_id)
                self.finished(request_id)
        step, self._step = self._step, StepJobs()
        step.fence = sorted(set(step.fence))
        step.decoding = any(
            tokens <= DECODED_TOKENS for tokens in output.num_scheduled_tokens.values()
        )
        return step

    def _advance(
        self, request_id: str, tracker: RequestTracker, computed: int, scheduled: int
    ) -> None:
        """Order a store of the prompt chunks that will be complete after this step."""
        # If a load fails, what this step computes on top of it is wrong. The engine shares blocks
        # that are filled inside a step with other requests as soon as they are allocated.
        if tracker.load is not None or self._running.any_fills(tracker.block_ids):
            return
        size = self._config.chunk_size
        last = min(
            (computed + scheduled) // size,
            tracker.prompt_chunks,
            chunks_allocated(tracker.block_ids, self._groups, size),
        )
        first = tracker.stored_chunks
        if last <= first or not self.shards:
            return
        tracker.stored_chunks = last
        chunks = storable_chunks(
            tracker.block_ids, self._groups, size, range(first, last), computed
        )
        if not chunks or self._port.incarnation is None:
            return
        digests = tracker.chain.extend(tracker.tokens)
        blocks: list[list[int]] = [[] for _ in self._groups]
        for chunk in chunks:
            part = slice_blocks(tracker.block_ids, self._groups, size, chunk, chunk + 1)
            for ids, more in zip(blocks, part, strict=True):
                ids += more
        job_id = self._running.start(request_id, reads=(block for ids in blocks for block in ids))
        tracker.stores.add(job_id)
        self._step.stores.append(
            StoreJob(job_id, [digests[chunk] for chunk in chunks], blocks, tracker.tenant)
        )

    # --- reports ----------------------------------------------------------------------------------

    def report(self, report: StepReport) -> None:
        """Take in which jobs are over; a job is when every worker has said so."""
        for job in self._running.report(report):
            tracker = self._trackers.get(job.request_id)
            if tracker is None:
                continue
            tracker.stores.discard(job.job_id)
            if tracker.load == job.job_id:
                self._load_over(job, tracker)

    def _load_over(self, job: RunningJob, tracker: RequestTracker) -> None:
        tracker.load = None
        if job.failed:
            tracker.load_failed = True
            tracker.stored_chunks = 0  # offer again what turned out to be missing
            logger.warning("a load of request %s failed; it is recomputed", job.request_id)
        self._end_session(tracker)

    def finished(self, request_id: str) -> None:
        """The request ended, whatever the reason; unknown ids are fine."""
        tracker = self._trackers.pop(request_id, None)
        if tracker is not None:
            self._end_session(tracker)

    def _end_session(self, tracker: RequestTracker) -> None:
        if tracker.leased:
            tracker.leased = False
            self._port.request(EndSession(request=tracker.session), self._config.request_timeout)

    @property
    def has_running_jobs(self) -> bool:
        return bool(self._running)

    def reset(self) -> bool:
        """Clear what the server has for this model.

        False when it did not answer, or while stores or loads of what is there are under way.
        """
        if self._running:
            logger.warning("not cleared: %d stores or loads are under way", len(self._running))
            return False
        if not self.shards:
            return True
        for tracker in self._trackers.values():
            if not tracker.admitted:
                tracker.lookup = tracker.hit_chunks = None
        try:
            self._port.request(Clear(shards=self.shards), RESET_TIMEOUT).result(RESET_TIMEOUT + 1.0)
        except (KVTransferError, FutureTimeout) as error:
            logger.warning("the cache server was not cleared: %s", error)
            return False
        return True
