"""The wire formats: OpenAI chat completions, completions and responses, Anthropic
messages, Google's generateContent.

A dialect is pure: bodies in, bodies and events out. Start with `dialect.py`.
"""
