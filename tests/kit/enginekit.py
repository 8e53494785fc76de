"""Stand-ins for what the connector meets: a cache that answers when told to, and the engine's
scheduler objects."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace

from lmcache_kernels.transfer.messages import Found, Lookup


class ScriptedPort:
    """Records every request; lookups stay open until :meth:`answer`, others are done at once."""

    chunk_tokens = None

    def __init__(self):
        self.incarnation = "one"
        self.sent = []
        self.open = []

    def request(self, message, timeout):
        self.sent.append((message, timeout))
        future = Future()
        if isinstance(message, Lookup):
            self.open.append(future)
        else:
            future.set_result(None)
        return future

    def of(self, kind):
        return [message for message, _ in self.sent if isinstance(message, kind)]

    def answer(self, chunks):
        self.open.pop(0).set_result(Found(chunks=chunks))

    def fail(self, error):
        self.open.pop(0).set_exception(error)

    def close(self):
        pass


@dataclass
class Request:
    """What vLLM's scheduler passes as a request."""

    request_id: str
    prompt_token_ids: list
    all_token_ids: list = None
    status: object = field(default_factory=lambda: SimpleNamespace(name="WAITING"))
    cache_salt: str = None
    lora_request: object = None
    mm_features: list = field(default_factory=list)
    prompt_embeds: object = None

    def __post_init__(self):
        if self.all_token_ids is None:
            self.all_token_ids = list(self.prompt_token_ids)

    @property
    def num_tokens(self):
        return len(self.all_token_ids)

    def preempt(self):
        self.status = SimpleNamespace(name="PREEMPTED")


def step_output(new=(), cached=(), preempted=()):
    """``new``: (id, block ids per group, computed, scheduled); ``cached``: (id, new block ids per
    group or None, computed, scheduled, resumed)."""
    scheduled = {row[0]: row[3] for row in (*new, *cached)}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=r[0], block_ids=r[1], num_computed_tokens=r[2]) for r in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[r[0] for r in cached],
            new_block_ids=[r[1] for r in cached],
            num_computed_tokens=[r[2] for r in cached],
            resumed_req_ids={r[0] for r in cached if r[4]},
        ),
        num_scheduled_tokens=scheduled,
        preempted_req_ids=set(preempted),
    )
