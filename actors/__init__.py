"""Runs: Ray actors, leases, process groups, migration and the engine.

Actors are thin shells around classes that can be tested without Ray. Only
``actors.engines`` imports vLLM.
"""
