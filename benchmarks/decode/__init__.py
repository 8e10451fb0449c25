"""Decode steps on a CPU, held against the rate at which its memory is read."""
