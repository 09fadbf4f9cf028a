"""Talks: HTTP in the dialects of RL loops. Routes only parse, call and render."""
