"""The workers of one gateway among themselves: requests to each other, and their
metrics together."""
