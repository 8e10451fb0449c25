"""The Metal engine: hand-written Metal Shading Language for MPS tensors, compiled by torch at run time."""
