"""Batches on their way from data-compose to trainers.

A batch waits in one place only: the :class:`persia.feed.inbox.Inbox` of the rank that will train on it.

* :mod:`persia.feed.inbox`: the trainer's side: batches of all replicas, merged in turn
* :mod:`persia.feed.server`: fills the inbox of a rank over gRPC (``PERSIA_NATS_URL`` is set)
* :mod:`persia.feed.script`: fills it from a data script in a thread of this process (embedded mode)
* :mod:`persia.feed.sender`: data-compose's side: one stream to each rank, in :mod:`persia.feed.stream`
* :mod:`persia.feed.replay`: whether a script that starts again sends the same batches
* :mod:`persia.feed.channel`: tokens and TLS of gRPC
* :mod:`persia.feed.protocol`: limits, and how a feed ends
"""
