"""The columns of Criteo's files, used to read them and to check a configuration without reading files."""

CRITEO_HEADER = ("label", *(f"I{n}" for n in range(1, 14)), *(f"C{n}" for n in range(1, 27)))
"""The label, 13 numeric columns, and 26 categorical columns, which are 32-bit values in hexadecimal digits."""
