"""What only the process that keeps the chunks runs: the store, and the service of its requests."""
