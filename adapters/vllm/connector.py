"""``LMCacheKernelsConnector``: the class vLLM loads.

``--kv-transfer-config '{"kv_connector": "LMCacheKernelsConnector",
"kv_connector_module_path": "lmcache_kernels.adapters.vllm.connector", "kv_role": "kv_both",
"kv_load_failure_policy": "recompute"}'``

It only translates between vLLM's hooks and the two halves, ``scheduler`` and ``worker``. Whatever
goes wrong in it costs a recomputation: without a server the engine runs as if it had no connector,
and picks the server up when it comes.
"""

from __future__ import annotations

import functools
import logging
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from lmcache_kernels.adapters.messaging.client import CacheClient
from lmcache_kernels.errors import ConfigError, KVTransferError
from lmcache_kernels.pages import pages_per_block
from lmcache_kernels.transfer.context_factory import create_transfer_context

from .config import PREFIX, ConnectorConfig
from .identity import kv_dtype, model_identity, slice_of_engine
from .jobs import StepJobs, StepReport
from .layouts import (
    check_can_move,
    comes_by_layer,
    describe_groups,
    group_shapes,
    layers_run_once,
)
from .scheduler import SchedulerSide
from .tracker import fails_whole
from .worker import WorkerSide

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

logger = logging.getLogger(__name__)


def _log_as_vllm_does() -> None:
    """vLLM configures its own loggers only; give ours its handlers and level."""
    ours, theirs = logging.getLogger("lmcache_kernels"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False


_log_as_vllm_does()

F = TypeVar("F", bound="Callable[..., Any]")


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to workers, each step."""

    jobs: StepJobs


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Workers to scheduler, when there is something to say."""

    report: StepReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ReportMetadata:
        return ReportMetadata(self.report.merge(other.report))


@dataclass
class ShardMetadata(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Worker to scheduler, once: which slice of the cache it stores and finds."""

    shard: bytes


def recompute_on_error(default: Any) -> Callable[[F], F]:
    """A hook that fails answers ``default``, which means "nothing cached", and logs why."""

    def wrap(hook: F) -> F:
        @functools.wraps(hook)
        def guarded(self: LMCacheKernelsConnector, *args: Any, **kwargs: Any) -> Any:
            try:
                return hook(self, *args, **kwargs)
            except Exception:
                logger.exception("%s failed; the engine goes on without the cache", hook.__name__)
                return default() if callable(default) else default

        return guarded  # type: ignore[return-value]

    return wrap


class LMCacheKernelsConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the module. vLLM makes one for the scheduler and one for each worker.

    Raises:
        ConfigError: a setting that cannot work. LayoutError: a model whose cache cannot be stored.
    """

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a store that did not happen is a miss later, nothing else

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return ConnectorConfig.from_extra(extra_config).loads_by_layer

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._config = ConnectorConfig.from_extra(transfer.kv_connector_extra_config)
        self._groups = group_shapes(kv_cache_config)
        for index, group in enumerate(self._groups):
            if self._config.chunk_size % group.block_tokens:
                raise ConfigError(
                    f"{PREFIX}chunk_size={self._config.chunk_size}: expected a multiple of "
                    f"{group.block_tokens}, the block size of KV-cache group {index}"
                )
        self._instance = secrets.randbits(63)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._client = self._connect(role)
        if role == KVConnectorRole.SCHEDULER:
            self._start_scheduler(vllm_config, transfer)

    def _connect(self, role: KVConnectorRole) -> CacheClient:
        client = CacheClient(
            self._config.url,
            chunk_tokens=self._config.chunk_size,
            ping_interval=self._config.heartbeat_interval,
            instance_id=self._instance if role == KVConnectorRole.WORKER else None,
            name=role.name.lower(),
            keys=self._config.keys(),
        )
        try:
            client.wait_ready(self._config.connect_timeout)
        except KVTransferError as error:
            logger.warning(
                "no usable cache server; the engine runs without it and keeps trying. %s "
                "(settings: %shost, %sport, %schunk_size)",
                *(error, PREFIX, PREFIX, PREFIX),
            )
        return client

    def _start_scheduler(self, vllm_config: Any, transfer: Any) -> None:
        if getattr(transfer, "kv_load_failure_policy", "recompute") != "recompute":
            logger.warning(
                "kv_load_failure_policy=%s: a chunk that cannot be loaded ends its request with an "
                'error. Set "kv_load_failure_policy": "recompute" in --kv-transfer-config to have '
                "it recomputed instead.",
                transfer.kv_load_failure_policy,
            )
        self._scheduler = SchedulerSide(
            self._config,
            self._client,
            model=model_identity(vllm_config, self._config.model_name),
            kv_dtype=kv_dtype(vllm_config),
            groups=self._groups,
            workers=vllm_config.parallel_config.world_size,
        )

    # --- worker -----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config = self._vllm_config
        held = slice_of_engine(config, config.parallel_config.rank)
        self._kv_caches = kv_caches  # planes hold addresses only
        attention = config.compilation_config.static_forward_context
        groups, layers = describe_groups(
            self._kv_cache_config, kv_caches, _isa_of(attention, kv_caches)
        )
        mode = self._config.transfer_mode
        if mode == "lmcache_driven":
            bound = {name: getattr(layer, "kv_cache", None) for name, layer in attention.items()}
            check_can_move(kv_caches, bound)
        context = create_transfer_context(
            groups,
            mode,
            chunk_tokens=self._config.chunk_size,
            part=held.part(layers),
            instance=self._instance,
            port=self._client,
            timeout=self._config.request_timeout,
            max_programs=self._config.max_programs or None,
        )
        self._shard = context.shard
        pages = [
            pages_per_block(shape.block_tokens, group.block_tokens)
            for shape, group in zip(self._groups, context.groups, strict=True)
        ]
        self._worker = WorkerSide(
            context,
            writer=held.writer,
            pages=pages,
            layers=layers
            if self._config.stores_by_layer and comes_by_layer(context.groups)
            else None,
            stores_by_layer=layers_run_once(config),
        )
        try:
            context.register()
        except KVTransferError as error:
            logger.warning("not registered with a cache server yet: %s", error)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return ShardMetadata(self._shard) if self._worker is not None else None

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        if self._worker is not None and isinstance(kv_connector_metadata, StepMetadata):
            self._worker.fence(kv_connector_metadata.jobs)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        # Always before the step's work is queued; loads may start behind it.
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin_step(self._jobs())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.start_loads(self._jobs())

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._worker is not None:
            self._worker.wait_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        if self._worker is not None:
            self._worker.layer_computed(layer_name)

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.start_stores()

    def _jobs(self) -> StepJobs:
        metadata = self._get_connector_metadata()
        return metadata.jobs if isinstance(metadata, StepMetadata) else StepJobs()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        ended, _failed = self._worker.poll() if self._worker is not None else (set(), set())
        return None, ended or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        ended, failed = self._worker.poll() if self._worker is not None else (set(), set())
        return base.KVConnectorTransferResults(
            finished_sending=None,
            finished_recving=ended or None,
            failed_recving=failed if fails_whole(self._groups) else set(),
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad = self._worker.take_bad_blocks() if self._worker is not None else set()
        return set() if fails_whole(self._groups) else bad

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = self._worker.take_report() if self._worker is not None else None
        return ReportMetadata(report) if report else None

    # --- scheduler --------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        if self._scheduler is not None:
            shards = [m.shard for m in metadata.values() if isinstance(m, ShardMetadata)]
            self._scheduler.shards = list(dict.fromkeys(shards))

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, tp): m for tp, m in metadata.items()})

    @recompute_on_error((0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler_side.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        block_ids = blocks.get_block_ids()
        try:
            self._scheduler_side.allocated(request.request_id, block_ids, num_external_tokens)
        except Exception:
            logger.exception("no load could be ordered for request %s", request.request_id)
            if num_external_tokens > 0:
                self._scheduler_side.refuse_load(request.request_id, block_ids)

    @recompute_on_error(lambda: StepMetadata(StepJobs()))
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return StepMetadata(self._scheduler_side.build_step(scheduler_output))

    @recompute_on_error(None)
    def update_connector_output(self, connector_output: Any) -> None:
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, ReportMetadata):
            self._scheduler_side.report(metadata.report)

    @recompute_on_error((False, None))
    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler_side.finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        result: tuple[bool, dict[str, Any] | None] = self.request_finished(request, [])
        return result

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_running_jobs

    def reset_cache(self) -> bool | None:
        return self._scheduler.reset() if self._scheduler is not None else None

    @property
    def _scheduler_side(self) -> SchedulerSide:
        if self._scheduler is None:
            raise RuntimeError("a scheduler hook was called on a worker's connector")
        return self._scheduler

    # --- end --------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        try:
            if self._worker is not None:
                self._worker.close()
        finally:
            self._client.close()


def _isa_of(layers: dict[str, Any], kv_caches: dict[str, torch.Tensor]) -> dict[str, str]:
    """Layers of the CPU attention back end, whose pages are laid out for one instruction set."""
    found = {}
    for name in kv_caches:
        isa = getattr(layers.get(name), "isa", None)
        if isa is not None:
            found[name] = str(isa)
    return found
