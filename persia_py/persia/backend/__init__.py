"""Access to the rows: one interface, two implementations.

* :mod:`persia.backend.base`: the interface, :class:`~persia.backend.base.Backend`
* :mod:`persia.backend.local`: the rows in this process (embedded mode)
* :mod:`persia.backend.remote`: the rows on embedding servers, for one or several ranks
* :mod:`persia.backend.rank_checks`: comparisons and barriers of the ranks
"""
