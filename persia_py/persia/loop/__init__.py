"""A pass over the data.

* :mod:`persia.loop.training`: :class:`~persia.loop.training.TrainingLoop`, which controls the pass
* :mod:`persia.loop.hooks`: its work apart from steps
* :mod:`persia.loop.source`, :mod:`persia.loop.feeder`: the data set, and the thread that reads it ahead
* :mod:`persia.loop.backward`, :mod:`persia.loop.loss_scale`: gradients, and their application to model and rows
* :mod:`persia.loop.autosave`: checkpoints while a run trains
* :mod:`persia.loop.quarantine`: batches at which training fails
* :mod:`persia.loop.preemption`, :mod:`persia.loop.watchdog`: loops that were asked to stop; loops without progress
"""
