"""Facts and pictures about files, as dataclasses and SVG. No torch, no ranks."""
