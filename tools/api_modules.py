"""The modules whose reference ``api_pages.py`` writes."""

GROUPS = {
    "Train": (
        *("persia", "persia.ctx", "persia.data", "persia.nn", "persia.models", "persia.embedding"),
        *("persia.embedding.data", "persia.embedding.optim", "persia.embedding.schedule", "persia.distributed"),
    ),
    "Describe data and training": ("persia.config", "persia.trainer", "persia.features", "persia.data.records"),
    "Serve": ("persia.serving",),
    "Test, debug and profile": ("persia.testing", "persia.debug", "persia.profile", "persia.errors"),
    "Paths of PersiaML": (
        *("persia.env", "persia.helper", "persia.launcher", "persia.logger", "persia.prelude", "persia.service"),
        "persia.utils",
    ),
}
"""The modules that a script imports. A test compares them with the package."""
OF_PACKAGE = {"Trainer": "persia.trainer", "load_config": "persia.config"}
"""The names that ``persia`` itself has, and their modules."""
