"""Reads rows of files as Arrow record batches: Parquet, CSV and TSV, Arrow IPC.

:func:`open_files` finds and checks files. A :class:`HashSplit` or :class:`TimeSplit` divides their rows into the parts
train, valid and test. A :class:`RecordReader` yields batches of equal size in an order that depends on its seed.
"""

from persia.data.records.files import Files, open_files
from persia.data.records.reader import RecordReader
from persia.data.records.split import PARTS, HashSplit, Split, TimeSplit

__all__ = ["PARTS", "Files", "HashSplit", "RecordReader", "Split", "TimeSplit", "open_files"]
