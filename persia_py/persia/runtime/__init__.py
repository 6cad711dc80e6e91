"""Foundations of every process: settings, errors, logging, exit codes, signals, the stack of contexts."""
