"""The ``persia`` command: :mod:`persia.cli.main`, and one file for each verb."""
