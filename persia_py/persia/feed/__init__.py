"""Send batches from data-compose to the trainers.

A batch waits in one place only: the :class:`persia.feed.inbox.Inbox` of the rank that trains on it.

* :mod:`persia.feed.inbox`: a rank's batches of all data-compose replicas, merged alternately
* :mod:`persia.feed.server`: fills a rank's inbox over gRPC
* :mod:`persia.feed.embedded`: in embedded mode, fills it from the data script in a thread of this process
* :mod:`persia.feed.sender`: a data-compose replica's end, with one :mod:`persia.feed.rank_stream` to each rank
* :mod:`persia.feed.replay`: checks whether a restarted data script sends the same batches
* :mod:`persia.feed.channel`: tokens, TLS and limits of gRPC connections
* :mod:`persia.feed.protocol`: limits of the protocol, and how a feed ends
"""
