"""Entry point of ``vllm.general_plugins``: makes the connector known to vLLM by its name alone."""

from __future__ import annotations

NAME = "LMCacheKernelsConnector"


def register() -> None:
    """Register the connector; vLLM calls this in each of its processes, some of them twice."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "lmcache_kernels.adapters.vllm.connector", NAME)
