"""Which part of a tensor lies where, and who writes and reads what. No I/O, no torch, no ranks."""
