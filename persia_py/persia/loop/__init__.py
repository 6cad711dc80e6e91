"""A pass over the data.

* :mod:`persia.loop.training`: :class:`~persia.loop.training.TrainingLoop`, which controls the pass
* :mod:`persia.loop.hooks`: the work of a loop apart from steps
* :mod:`persia.loop.source`, :mod:`persia.loop.feeder`: the data set, and the thread that reads it ahead
* :mod:`persia.loop.backward`: gradients, and their application to model and rows
* :mod:`persia.loop.precision`, :mod:`persia.loop.loss_scale`: the precision of the model, and loss scaling
* :mod:`persia.loop.finite`, :mod:`persia.loop.out_of_memory`: reports about steps that cannot be applied
* :mod:`persia.loop.autosave`: checkpoints while a run trains
* :mod:`persia.loop.quarantine`: batches at which training fails
* :mod:`persia.loop.preemption`, :mod:`persia.loop.watchdog`: stopping a loop on request; detection of loops without
  progress
"""
