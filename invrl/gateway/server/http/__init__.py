"""HTTP with a client: the protocol and its limits, one exchange, bodies and
refusals."""
