"""What every part of a process uses: settings, errors, logging, exit codes, signals, the stack of contexts."""
