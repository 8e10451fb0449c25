"""Tiled eager torch ops: the full semantics, forward and gradients, on any torch device."""
