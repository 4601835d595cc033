"""The text of a reply, parsed into reasoning, content and tool calls, and the detection
of a model's parsers."""
