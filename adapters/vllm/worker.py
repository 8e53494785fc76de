"""A worker's half of the connector: moves what the scheduler's half orders, reports what is over."""

from __future__ import annotations

import logging
import re
import sys
from concurrent.futures import Future
from typing import TYPE_CHECKING

from lmcache_kernels.errors import LayoutError
from lmcache_kernels.ids import ABSENT
from lmcache_kernels.pages import split_ids
from lmcache_kernels.transfer.engine_driven.context import EngineDrivenContext

from .following import FollowingStore
from .jobs import StepReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from lmcache_kernels.transfer.context_factory import TransferContext
    from lmcache_kernels.transfer.engine_driven.layered_load import LayeredLoad
    from lmcache_kernels.transfer.store_transfer import StoreTransfer

    from .jobs import LoadJob, StepJobs, StoreJob

logger = logging.getLogger(__name__)

LAYER_TIMEOUT = 10.0
"""Seconds that a step waits for one layer of a load. After that it waits for none of that load any more,
and the load has failed, also if it comes right in the end: the step has used what was there before."""


def places_of(layers: Sequence[Sequence[str]]) -> dict[str, int]:
    """When a step needs each layer: by the numbers in its name, as the models of vLLM are built."""
    names = [name for group in layers for name in group]
    ordered = sorted(names, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])
    return {name: place for place, name in enumerate(ordered)}


class WorkerSide:
    """See the module. All hooks run on the engine's thread and only poll.

    Args:
        context: of this worker's cache.
        writer: whether this worker stores; ranks that hold copies of the same heads do not.
        pages: per group, pages of the context that make one of the engine's blocks; the attention
            kernel may cut blocks into smaller ones.
        layers: per group its layers by name, in the order of their rows, for transfers that go layer
            by layer, which only an engine-driven context makes: synchronous loads, and stores if
            ``stores_by_layer``; None where they go whole.
        fence_timeout: seconds a step waits for the gather of a store whose blocks it overwrites.
    """

    def __init__(
        self,
        context: TransferContext,
        *,
        writer: bool,
        pages: Sequence[int],
        layers: Sequence[Sequence[str]] | None = None,
        stores_by_layer: bool = False,
        fence_timeout: float = 5.0,
    ) -> None:
        self._context = context
        self._by_layer = context if layers and isinstance(context, EngineDrivenContext) else None
        self._follows = self._by_layer if stores_by_layer else None
        self._pages = pages
        self._writer = writer
        self._fence_timeout = fence_timeout
        self._ordered: list[StoreJob] = []
        self._stores: dict[int, StoreTransfer] = {}
        self._loads: dict[int, tuple[LoadJob, Future[int]]] = {}
        self._report = StepReport()
        self._bad_blocks: set[int] = set()
        self._places = places_of(layers or ())
        self._order = [[self._places[name] for name in group] for group in layers or ()]
        self._layered: list[tuple[LoadJob, LayeredLoad]] = []
        self._late: set[int] = set()
        self._following: FollowingStore | None = None

    def fence(self, step: StepJobs) -> None:
        """Before the step runs: the gathers it would spoil are over, or stopped."""
        # An engine may leave out the end of a step (it does on inner pipeline stages).
        self._step_is_queued()
        self._ordered = [job for job in self._ordered if not self._give_up(job, step.fence)]
        self._start_ordered()
        transfers = [self._stores[job] for job in step.fence if job in self._stores]
        if transfers:
            self._context.flush(transfers, self._fence_timeout)

    def begin_step(self, step: StepJobs) -> None:
        """Before the step's work is queued: take note of its stores, or begin them."""
        self._step_is_queued()
        self._context.decoding = step.decoding
        self._ordered += step.stores
        if self._follows and self._writer and self._ordered:
            self._follow(self._follows)

    def _follow(self, context: EngineDrivenContext) -> None:
        """Begin the ordered stores, as one, since only one at a time can follow the step.

        One is for one tenant: those of others go when the step is over.
        """
        tenant = self._ordered[0].tenant
        jobs = [job for job in self._ordered if job.tenant == tenant]
        try:
            store = context.submit_layered_store(
                [digest for job in jobs for digest in job.digests],
                self._joined_pages(jobs),
                self._order,
                tenant=tenant,
            )
        except Exception as error:  # whatever it was, the plain stores will say
            logger.debug("stores do not go by layers: %s", error)
            return
        self._stores.update((job.job_id, store) for job in jobs)
        self._ordered = [job for job in self._ordered if job.tenant != tenant]
        self._following = FollowingStore(store, self._places)

    def _joined_pages(self, jobs: Sequence[StoreJob]) -> list[list[int]]:
        """Pages of the chunks of all jobs.

        Raises:
            LayoutError: a job with other blocks than its chunks have: it would shift all behind it.
        """
        joined: list[list[int]] = [[] for _ in self._pages]
        for job in jobs:
            for pages, more, per_chunk in zip(
                joined, self._pages_of(job), self._context.layout.blocks_per_chunk, strict=True
            ):
                if len(more) != len(job.digests) * per_chunk:
                    raise LayoutError(
                        f"store {job.job_id}: expected {per_chunk} pages a chunk, got {len(more)} "
                        f"for {len(job.digests)} chunks"
                    )
                pages += more
        return joined

    def layer_computed(self, name: str) -> None:
        """Inside the step, behind the layer: what is queued writes all of it."""
        self._tell(lambda following: following.computed(name))

    def _step_is_queued(self) -> None:
        """Whatever was told of layers or not: all of the step's work is queued."""
        self._tell(FollowingStore.all_computed)
        self._following = None

    def _tell(self, what: Callable[[FollowingStore], None]) -> None:
        """Not storing is right, if the device takes no further event, and a step that goes on."""
        if self._following is None:
            return
        try:
            what(self._following)
        except Exception as error:
            logger.warning("the stores of this step are dropped: %s", error)
            self._drop_step()

    def start_loads(self, step: StepJobs) -> None:
        """Start the step's loads; synchronous ones are done on return."""
        for job in step.loads:
            if job.synchronous and self._by_layer and self._start_layered(job, self._by_layer):
                continue
            future = self._start_load(job)
            self._loads[job.job_id] = (job, future)
            if job.synchronous:
                self._finish_load(job, future)

    def _start_layered(self, job: LoadJob, context: EngineDrivenContext) -> bool:
        try:
            load = context.submit_layered_retrieve(
                job.digests, self._pages_of(job), self._order, skip_first_n_tokens=job.skip_tokens
            )
        except Exception as error:  # whatever it was, the plain load will say
            logger.debug("load %d does not come by layers: %s", job.job_id, error)
            return False
        self._loads[job.job_id] = (job, load.result)
        self._layered.append((job, load))
        return True

    def wait_layer(self, name: str) -> None:
        """Inside the step, before the layer: what is queued next finds what is loaded for it."""
        place = self._places.get(name)
        if place is None:
            return
        for job, load in self._layered:
            if job.job_id not in self._late and not load.wait_layer(place, LAYER_TIMEOUT):
                logger.warning(
                    "load %d: layer %s is not there after %g s", job.job_id, name, LAYER_TIMEOUT
                )
                self._late.add(job.job_id)

    def _finish_layered(self) -> None:
        """When the step is over: how its loads by layers ended."""
        layered, self._layered = self._layered, []
        for job, load in layered:
            if job.job_id in self._loads:
                self._finish_load(job, load.result)

    def _start_load(self, job: LoadJob) -> Future[int]:
        try:
            return self._context.submit_retrieve(
                job.digests, self._pages_of(job), skip_first_n_tokens=job.skip_tokens
            )
        except Exception as error:  # whatever it was, recomputing is right
            failed: Future[int] = Future()
            failed.set_exception(error)
            return failed

    def start_stores(self) -> None:
        """After the step's work was queued: start its stores, or let them end.

        Engines call this behind a step that has failed too, while its error is on its way: what the
        stores would read was never written, so they are dropped.
        """
        if sys.exc_info()[0] is not None:
            self._drop_step()
        self._step_is_queued()
        self._finish_layered()
        self._start_ordered()

    def _drop_step(self) -> None:
        following, self._following = self._following, None
        if following is not None:
            following.drop()
        for job in self._ordered:
            self._over(job.job_id)
        self._ordered = []

    def _give_up(self, job: StoreJob, fenced: list[int]) -> bool:
        if job.job_id in fenced:
            self._over(job.job_id)
        return job.job_id in fenced

    def _start_ordered(self) -> None:
        ordered, self._ordered = self._ordered, []
        for job in ordered:
            if not self._writer:
                self._over(job.job_id)
                continue
            try:
                self._stores[job.job_id] = self._context.submit_store(
                    job.digests, self._pages_of(job), tenant=job.tenant
                )
            except Exception as error:  # whatever it was, not storing is right
                logger.warning("store %d was refused: %s", job.job_id, error)
                self._over(job.job_id)

    def poll(self) -> tuple[set[str], set[str]]:
        """(requests whose asynchronous load ended, those of them whose load failed)."""
        self._finish_layered()
        for job_id, transfer in list(self._stores.items()):
            if transfer.result.done():
                del self._stores[job_id]
                self._over(job_id)
                error = transfer.result.exception()
                if error is not None:
                    logger.debug("store %d was not published: %s", job_id, error)
        ended, failed = set(), set()
        for job, future in list(self._loads.values()):
            if future.done():
                ended.add(job.request_id)
                if not self._finish_load(job, future):
                    failed.add(job.request_id)
        return ended, failed

    def _finish_load(self, job: LoadJob, future: Future[int]) -> bool:
        """Report the load; waits for it when it is not done. False when it failed."""
        del self._loads[job.job_id]
        self._over(job.job_id)
        try:
            loaded = future.result()
        except Exception as error:  # whatever it was, recomputing is right
            logger.warning("load for request %s failed: %s", job.request_id, error)
            loaded = 0
        if job.job_id in self._late:
            self._late.discard(job.job_id)
            loaded = 0
        if job.digests and loaded == len(job.digests):
            return True
        self._report.failed.add(job.job_id)
        self._bad_blocks.update(self._blocks_from(job, loaded))
        return False

    def _blocks_from(self, job: LoadJob, chunk: int) -> Iterable[int]:
        """Blocks of the load's chunks from number ``chunk`` on that it should have filled."""
        for ids, per_chunk_pages, pages in zip(
            job.block_ids, self._context.layout.blocks_per_chunk, self._pages, strict=True
        ):
            per_chunk = per_chunk_pages // pages
            skip = job.skip_tokens // (self._context.layout.chunk_tokens // per_chunk)
            for block in ids[max(chunk * per_chunk, skip) :]:
                if block != ABSENT:
                    yield block

    def _pages_of(self, job: LoadJob | StoreJob) -> list[list[int]]:
        return [split_ids(ids, n) for ids, n in zip(job.block_ids, self._pages, strict=True)]

    def _over(self, job_id: int) -> None:
        self._report.over[job_id] = 1

    def take_bad_blocks(self) -> set[int]:
        """Blocks that a failed load left without their content; each is returned once."""
        taken, self._bad_blocks = self._bad_blocks, set()
        return taken

    def take_report(self) -> StepReport:
        """What ended since the last call."""
        taken, self._report = self._report, StepReport()
        return taken

    def close(self) -> None:
        self._context.close()
