"""The router in front of the engines, sglang-router or smg: its process and its
options."""
