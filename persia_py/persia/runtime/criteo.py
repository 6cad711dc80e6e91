"""The columns of Criteo's files, for reading them and for checking a configuration without reading files."""

CRITEO_HEADER = ("label", *(f"I{n}" for n in range(1, 14)), *(f"C{n}" for n in range(1, 27)))
"""The label, 13 numbers, and 26 categories, which are 32 bits in hexadecimal digits."""
