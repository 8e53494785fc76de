"""Connections to one Valkey or Redis server, or to the nodes of a cluster.

A cluster's slots are looked up again after any failure and whenever a node says that a key has
moved. Nothing is tried a second time: a call costs at most the time of its sockets.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

READ_BYTES = 1 << 20
"""Bytes that a socket is asked for at once. With the client's own 64 KiB large values come in at a
third of the speed."""


class Nodes:
    """The clients, and which of them keeps which name.

    Args:
        host, port: of the server, or of any node of the cluster.
        cluster: it is one.
        options: of every connection, as the client's package names them.
    """

    def __init__(self, host: str, port: int, options: Mapping[str, Any], *, cluster: bool) -> None:
        self._first = (host, port)
        self._options = dict(options)
        self._clustered = cluster
        self._lock = threading.Lock()
        self._clients: dict[tuple[str, int], Any] = {}
        self._cluster: Any = None
        self._stale = False

    def by_node(self, names: Sequence[str]) -> list[tuple[Any, list[int]]]:
        """A client for each node, and the positions of the names that it keeps."""
        if not self._clustered:
            return [(self._client(*self._first), list(range(len(names))))]
        cluster = self._slots()
        found: dict[tuple[str, int], list[int]] = {}
        for position, name in enumerate(names):
            node = cluster.get_node_from_key(name)
            found.setdefault((node.host, node.port), []).append(position)
        return [(self._client(*node), positions) for node, positions in found.items()]

    def all(self) -> list[Any]:
        """A client for each node that keeps names."""
        if not self._clustered:
            return [self._client(*self._first)]
        return [self._client(node.host, node.port) for node in self._slots().get_primaries()]

    def moved(self) -> None:
        """Look the slots up again before the next call."""
        self._stale = True

    def close(self) -> None:
        with self._lock:
            for client in self._clients.values():
                client.connection_pool.disconnect()
            self._clients.clear()
            if self._cluster is not None:
                self._cluster.close()
                self._cluster = None

    def _client(self, host: str, port: int) -> Any:
        from valkey import ConnectionPool, SSLConnection, Valkey
        from valkey.connection import PythonRespSerializer

        with self._lock:
            client = self._clients.get((host, port))
            if client is None:
                options = dict(self._options)
                if options.pop("ssl", False):
                    options["connection_class"] = SSLConnection
                pool = ConnectionPool(host=host, port=port, socket_read_size=READ_BYTES, **options)
                # The package's other one, in C, copies values together before it sends them.
                packer = PythonRespSerializer(READ_BYTES, pool.get_encoder().encode)
                pool.connection_kwargs["command_packer"] = packer
                client = self._clients[host, port] = Valkey(connection_pool=pool)
            return client

    def _slots(self) -> Any:
        from valkey.cluster import ValkeyCluster

        with self._lock:
            if self._cluster is None:
                host, port = self._first
                options = {name: value for name, value in self._options.items() if name != "db"}
                self._cluster = ValkeyCluster(host=host, port=port, **options)
            elif self._stale:
                self._cluster.nodes_manager.initialize()
            self._stale = False
            return self._cluster
