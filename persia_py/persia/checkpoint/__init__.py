"""Checkpoints: rows with their optimizer state, the model, the dense optimizer, random state, data position.

* :mod:`persia.checkpoint.snapshot`: one checkpoint, written and read
* :mod:`persia.checkpoint.run_state`, :mod:`persia.checkpoint.rng_state`: the state of a run apart from rows
* :mod:`persia.checkpoint.policy`: the options of a script, :class:`persia.ctx.Checkpoints`
* :mod:`persia.checkpoint.resume`: the newest checkpoint, loaded after a restart
* :mod:`persia.checkpoint.object_store`: replicas in an object store
"""
