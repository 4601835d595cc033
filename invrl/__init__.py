"""invrl: an RL post-training server.

The environment calls us: a program that speaks the OpenAI, Anthropic or Google API runs
unmodified against the gateway, and the model behind it is trained on exactly the tokens
that it sampled there.
"""

__version__ = "0.1.0"
