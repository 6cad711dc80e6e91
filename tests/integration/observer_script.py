"""Evaluation in a process that is not a rank of the run."""

import os
import sys

import numpy as np
from torch.utils.dlpack import from_dlpack

from persia.ctx import eval_ctx
from persia.embedding.data import IDTypeFeatureWithSingleID, PersiaBatch
from persia.nn import EmbeddingCollection, TableConfig

ids = np.arange(200, dtype=np.uint64)
wanted = PersiaBatch([IDTypeFeatureWithSingleID("a", ids), IDTypeFeatureWithSingleID("b", ids)], requires_grad=False)
with eval_ctx() as ctx:
    for change in sys.argv[1:]:  # a process that only evaluates must not make these calls during a run
        getattr(ctx, change)(*([] if change == "clear_embeddings" else [os.environ["PERSIA_CKPT_DIR"]]))
    rows, _ = (from_dlpack(tensor) for tensor in ctx.get_embedding_from_data(wanted).embeddings())
    sizes, found = ctx.get_embedding_size(), int((rows != 0).any(1).sum())
    sys.stderr.write(f"sizes {sizes}, rows of a: {found}, missing {ctx.evaluation_report.missing}\n")
if not sys.argv[1:]:
    tables = EmbeddingCollection([TableConfig("a", 4, ["a"]), TableConfig("b", 4, ["b"])], None).eval()
    vectors = tables({"a": ids, "b": ids})
    assert int((vectors["a"] != 0).any(1).sum()) == found
    sys.stderr.write(f"a collection: missing {tables.evaluation_report.missing}\n")
