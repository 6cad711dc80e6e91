"""The contexts of training and evaluation scripts.

Each context object can be entered once. Contexts can be nested. An inner context shares the engine and rows of the
outermost one. If ``PERSIA_NATS_URL`` is not set, the rows are in this process and are dropped with the outermost
context: save a checkpoint to keep them. :class:`Checkpoints` is :class:`persia.checkpoint.policy.Checkpoints`.

* :mod:`persia.ctx.base`: the base of all contexts
* :mod:`persia.ctx.embedding`: look-ups and evaluation
* :mod:`persia.ctx.step`, :mod:`persia.ctx.train`: the steps of training, and the run around them
* :mod:`persia.ctx.data`: sending batches to trainers
"""

from persia.checkpoint.policy import Checkpoints
from persia.ctx.base import BaseCtx, PreprocessMode, cnt_ctx
from persia.ctx.data import DataCtx
from persia.ctx.embedding import EmbeddingCtx, eval_ctx
from persia.ctx.infer import InferCtx
from persia.ctx.train import TrainCtx

__all__ = [
    "BaseCtx",
    "Checkpoints",
    "DataCtx",
    "EmbeddingCtx",
    "InferCtx",
    "PreprocessMode",
    "TrainCtx",
    "cnt_ctx",
    "eval_ctx",
]
