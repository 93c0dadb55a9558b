"""Which rank has which part of a tensor: boxes, meshes, layouts, cover proofs and plans. No I/O, torch or ranks."""
