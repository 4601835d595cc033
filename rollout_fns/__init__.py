"""Small examples to copy: one rollout function per file (see README.md)."""
