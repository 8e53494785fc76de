"""How bytes get between a cache and host memory: movers, their paths, and who picks among them."""
