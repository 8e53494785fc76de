"""vLLM: a KV connector that stores and finds KV cache through a lmcache-kernels server."""
