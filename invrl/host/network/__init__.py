"""Connections between our own processes: ports, proxies, and the rendezvous of
ranks."""
