"""The intervals of waits without a time limit."""

REMIND_S = 30.0
"""Seconds between the log lines of a long wait."""
SLICE_S = 0.5
"""The maximum delay of a signal during a wait, in seconds."""
