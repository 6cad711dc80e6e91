"""``persia doctor``: checks of this machine, of the network and of a configuration, and ``--ladder``.

* :class:`persia.doctor.check.Check`: one result
* :mod:`persia.doctor.run`: the checks by name, in the order in which they run
* :mod:`persia.doctor.ladder`: the ten steps from a model alone to a run with several ranks
"""
