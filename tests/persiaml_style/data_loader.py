"""Sends the training data, as PersiaML's data loaders do."""

import os

from people import batches

from persia.ctx import DataCtx
from persia.env import get_replica_index
from persia.logger import get_logger

logger = get_logger("data_loader")

if __name__ == "__main__":
    with DataCtx() as ctx:
        for batch in batches(int(os.environ.get("BATCHES", "200")), 64, seed=1 + get_replica_index()):
            ctx.send_data(batch)
    logger.info("all data is sent")
