"""Gradients and parameters of ranks that train one model: made alike, reduced, averaged."""
