"""``python -m persia``."""

from persia.cli import main

main()
