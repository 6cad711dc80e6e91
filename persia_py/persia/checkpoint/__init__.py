"""Checkpoints: rows with their optimizer state, the model, the dense optimizer, random state, data position.

* :mod:`persia.checkpoint.snapshot`: one checkpoint, written and read
* :mod:`persia.checkpoint.rng_state`: the state of the random generators
* :mod:`persia.checkpoint.autosave`: the checkpoints of a run, :class:`persia.ctx.Checkpoints`
* :mod:`persia.checkpoint.object_store`: replicas of checkpoints in an object store
"""
