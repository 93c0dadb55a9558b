"""What state is: names, shapes, boxes, who holds what, and the merge plan. Pure: no I/O, no torch, no ranks."""
