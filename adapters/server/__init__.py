"""The cache server as a process: run it, or start one."""
