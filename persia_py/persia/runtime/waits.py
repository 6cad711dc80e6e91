"""The two times of a wait without a limit."""

REMIND_S = 30.0
"""Seconds between the log lines of a long wait."""
SLICE_S = 0.5
"""Seconds that a signal may have to wait."""
