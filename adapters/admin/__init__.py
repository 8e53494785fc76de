"""What a person or a monitor asks of a running server, over HTTP: metrics, state, and changes by token."""
