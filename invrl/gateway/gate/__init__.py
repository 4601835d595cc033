"""The gate that each turn passes before it is sampled: it may hold a turn back while the
sessions of an engine need more KV cache than it has."""
