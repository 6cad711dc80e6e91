"""The import path of PersiaML for ``persia-launcher``: ``python -m persia.launcher nn-worker FILE``."""

from persia.launch.cli import app, main

cli = main

__all__ = ["app", "cli", "main"]

if __name__ == "__main__":
    main()
