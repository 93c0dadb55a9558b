"""A published checkpoint directory: built beside its target, complete or not there. No torch, no ranks."""
