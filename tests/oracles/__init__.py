"""Slow, obviously right versions of what rapid does fast."""
