"""Decides: where a sample decodes, who leaves, which expert goes where.

Pure Python. Nothing here knows Ray, torch, vLLM, a clock, I/O or logging, so the live
coordinator, the tests and a simulator run exactly this code.
"""
