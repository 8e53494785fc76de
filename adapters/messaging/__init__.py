"""Requests and replies over ZeroMQ sockets of this machine."""
