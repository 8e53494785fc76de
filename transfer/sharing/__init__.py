"""How one process hands the tensors of its KV cache to another: described, never copied or sent.

The owner wraps tensors (:mod:`~lmcache_kernels.transfer.sharing.wrapping`) and sends descriptors,
which are data and nothing else; the other side opens them. What a descriptor refers to, and how it
is made and opened, is up to the device the tensor lies on.
"""
