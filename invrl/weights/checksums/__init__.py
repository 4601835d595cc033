"""Checksums of many tensors, on CPU and GPU, and copies that they verify."""
