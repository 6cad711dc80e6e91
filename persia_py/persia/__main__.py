"""``python -m persia``."""

from persia.cli.main import main

main()
