"""From the cache of one process straight into that of another."""
