"""Conversions: the tensors of one model family by the names, and with the values, of another.

A conversion is data (`rules`): pairs of name patterns, each with the operations that turn the values of the one side
into those of the other. The built-in conversions (`choice`) have the form of a user's own JSON file.

Operations move elements and never compute. So a rule becomes a map between boxes (`patches`): for a box of an input
tensor, the boxes of the outputs that it fills, with the strides and the order in which their elements lie in it.
Readers of boxes need to know nothing else, and no tensor is ever held whole.
"""
