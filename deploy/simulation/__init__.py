"""Scenarios: from a file to simulated rollouts, and their comparison."""
