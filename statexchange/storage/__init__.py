"""Bytes at rest: durable publish, the tensor file, the workspace. No torch, no ranks."""
