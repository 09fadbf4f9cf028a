"""The demo: one recorded batch, decoded once by a fixed group and once by one that shrinks."""
