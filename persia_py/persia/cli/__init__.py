"""The ``persia`` command: :mod:`persia.cli.main`, and one module for each verb or group of verbs."""
