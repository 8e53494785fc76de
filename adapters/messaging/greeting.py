"""Is the server that answered a greeting one that this client can work with? Pure."""

from __future__ import annotations

from lmcache_kernels.transfer.messages import PROTOCOL_VERSION, ErrorReply, Reply, Welcome


def refusal(url: str, reply: Reply, chunk_tokens: int | None) -> str | None:
    """Why the server that answered ``reply`` cannot be used; None: it can.

    Args:
        url: of the server, for the text.
        reply: to a Hello.
        chunk_tokens: tokens per chunk that it must work with; None takes any.
    """
    if not isinstance(reply, Welcome):
        said = f"{reply.code}: {reply.message}" if isinstance(reply, ErrorReply) else repr(reply)
        return (
            f"{url}: the cache server refused this client, which speaks protocol version "
            f"{PROTOCOL_VERSION} ({said}); install the same release of lmcache-kernels on both "
            "sides"
        )
    if reply.protocol != PROTOCOL_VERSION:
        return (
            f"{url}: the cache server speaks protocol version {reply.protocol}, this client "
            f"{PROTOCOL_VERSION}; install the same release of lmcache-kernels on both sides"
        )
    if chunk_tokens not in (None, reply.chunk_tokens):
        return (
            f"{url}: the cache server uses chunks of {reply.chunk_tokens} tokens, this client "
            f"{chunk_tokens}; start the server with `lmcache-kernels serve --chunk-size "
            f"{chunk_tokens}`, or use chunks of {reply.chunk_tokens} tokens here"
        )
    return None


def clock_offset(server_clock: float, sent_at: float, received_at: float) -> float:
    """What to add to our clock to get the server's, in seconds.

    The server read ``server_clock`` at some time between the two, so the offset has two bounds. On
    one machine both clocks are the same one: 0 lies between the bounds and is exact, however long
    the reply took. Otherwise the bound that is nearer to 0 is taken.
    """
    return min(max(0.0, server_clock - received_at), server_clock - sent_at)
