"""A pass over the data.

* :mod:`persia.loop.backward`: gradients, and their way to model and rows
* :mod:`persia.loop.loss_scale`: the scale of the loss in mixed precision
* :mod:`persia.loop.quarantine`: batches at which training fails
"""
