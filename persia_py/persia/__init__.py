"""Persia: train recommender models whose embedding tables live in sharded parameter servers.

Layout:

* :mod:`persia.ctx`: the contexts a training script works in
* :mod:`persia.data`: data loaders and the data sets that feed them
* :mod:`persia.embedding`: features, batches and optimizers of embeddings
* :mod:`persia.models`: models in plain torch
* :mod:`persia.distributed`: several ranks: options, agreement, and the run's end and summary
* :mod:`persia.embedded`, :mod:`persia.remote`: rows in this process, or on embedding servers
* :mod:`persia.feed`: batches on their way from data-compose to trainers
* :mod:`persia.launch`: starting, watching and ending the processes of a job
* :mod:`persia.checkpoint`: what a checkpoint holds, and its inspection
* :mod:`persia.errors`: everything raised on purpose
* :mod:`persia.cli`: the ``persia`` command
"""

from persia._core import check_core

__version__ = "0.1.0"

check_core(__version__)
