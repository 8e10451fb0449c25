"""Configs measured on this very device: where they are kept (`store`), how they are found (`search`)."""
