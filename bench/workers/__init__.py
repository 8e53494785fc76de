"""Workers of a server that need no torch, in processes of their own."""
