"""Matching of a request with the recorded turns of its session: the turn that it
continues, or the reason of a fork."""
