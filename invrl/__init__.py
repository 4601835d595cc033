"""invrl: an RL post-training server. The environment calls us, runs unmodified, and gets trained."""

__version__ = "0.1.0"
