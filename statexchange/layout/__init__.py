"""What state is: names, shapes, boxes, who holds what, and the merge plan. No I/O, no torch, no ranks."""
