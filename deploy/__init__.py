"""Composes: command line, configuration, Serve application, demo."""
