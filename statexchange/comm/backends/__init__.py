"""Backends: how ranks move bytes and reduce tensors; one module for each transport."""
