"""The content of a table, and a ``persia.yml`` for it.

:func:`inspect` reads files once in bounded memory and returns an :class:`Inspection`: statistics of each column, and a
proposal with reasons. The modules, in the order of the steps:

* :mod:`~persia.data.inspect.scan`: the pass, with :mod:`~persia.data.inspect.columns` and
  :mod:`~persia.data.inspect.sketches`
* :mod:`~persia.data.inspect.labels`, :mod:`~persia.data.inspect.roles`: the label, the time, the group, the weight
* :mod:`~persia.data.inspect.features`, :mod:`~persia.data.inspect.settings`: the rules of the proposal
* :mod:`~persia.data.inspect.document`, :mod:`~persia.data.inspect.report`: its text, and the table that is printed
"""

from persia.data.inspect.inspection import Inspection, inspect

__all__ = ["Inspection", "inspect"]
