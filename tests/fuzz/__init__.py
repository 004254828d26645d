"""Damaged and wrong input: whatever a user or another process hands over is refused in words, or it works."""
