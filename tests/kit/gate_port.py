"""A cache whose answers can be held back, refused, watched, and which can be another one suddenly."""

from __future__ import annotations

import threading
from concurrent.futures import Future


class GatePort:
    """A port before another one.

    Attributes:
        inner: where requests go.
        sent: every request, in order.
        replies: (request, reply) of those answered.
    """

    def __init__(self, inner):
        self.inner = inner
        self.sent = []
        self.replies = []
        self._lock = threading.Condition()
        self._held = ()
        self._waiting = []
        self._refused = {}
        self._hooks = []

    @property
    def incarnation(self):
        return self.inner.incarnation

    @property
    def chunk_tokens(self):
        return self.inner.chunk_tokens

    def request(self, message, timeout):
        for kind, hook in self._hooks:
            if isinstance(message, kind):
                hook(message)
        with self._lock:
            self.sent.append(message)
            self._lock.notify_all()
            error = self._refused.get(type(message))
            if error is None and isinstance(message, self._held):
                future = Future()
                self._waiting.append((message, timeout, future))
                return future
        if error is not None:
            future = Future()
            future.set_exception(error)
            return future
        future = self.inner.request(message, timeout)
        future.add_done_callback(lambda done: self._note(message, done))
        return future

    def _note(self, message, done):
        if done.exception() is None:
            self.replies.append((message, done.result()))

    def close(self):
        self.inner.close()

    # --- for tests --------------------------------------------------------------------------------

    def of(self, kind):
        return [message for message in self.sent if isinstance(message, kind)]

    def hold(self, *kinds):
        """Requests of these kinds are not passed on before :meth:`let_go`."""
        self._held = kinds

    def let_go(self):
        with self._lock:
            self._held = ()
            waiting, self._waiting = self._waiting, []
        for message, timeout, future in waiting:
            passed = self.inner.request(message, timeout)
            passed.add_done_callback(lambda done, future=future: _hand_on(done, future))

    def refuse(self, kind, error):
        """Requests of this kind fail with ``error``; None: no more."""
        self._refused[kind] = error

    def before(self, kind, hook):
        """Call ``hook(message)`` on the thread that sends one of these."""
        self._hooks.append((kind, hook))

    def wait_sent(self, kind, count=1, timeout=30.0):
        with self._lock:
            assert self._lock.wait_for(lambda: len(self.of(kind)) >= count, timeout)


def _hand_on(done, future):
    if done.exception() is not None:
        future.set_exception(done.exception())
    else:
        future.set_result(done.result())
