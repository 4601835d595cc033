"""The Ray of a run: its environment, the watch over it, and the actors of a run with
their heartbeat and output."""
