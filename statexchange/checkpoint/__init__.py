"""Merge checkpoints offline and publish checkpoint directories. No torch, no ranks."""
