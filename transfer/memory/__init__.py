"""Host memory: the arena that processes share, its slots, its allocation and its page-locking."""
