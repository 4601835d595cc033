"""The start of one engine: the options of SGLang, its process, or an engine that others
have started."""
