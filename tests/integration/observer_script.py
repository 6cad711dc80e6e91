"""Evaluation in a process that is no rank of the run."""

import os
import sys

import numpy as np
from torch.utils.dlpack import from_dlpack

from persia.ctx import eval_ctx
from persia.embedding.data import IDTypeFeatureWithSingleID, PersiaBatch

ids = np.arange(200, dtype=np.uint64)
wanted = PersiaBatch([IDTypeFeatureWithSingleID("a", ids), IDTypeFeatureWithSingleID("b", ids)], requires_grad=False)
with eval_ctx() as ctx:
    for change in sys.argv[1:]:  # calls that a process that only evaluates may not make in a run
        getattr(ctx, change)(*([] if change == "clear_embeddings" else [os.environ["PERSIA_CKPT_DIR"]]))
    rows, _ = (from_dlpack(tensor) for tensor in ctx.get_embedding_from_data(wanted).embeddings())
    sys.stderr.write(f"sizes {ctx.get_embedding_size()}, rows of a: {int((rows != 0).any(1).sum())}\n")
