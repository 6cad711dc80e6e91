"""Train a DLRM on Census-Income. Options and their defaults: python examples/dlrm/train.py --help.

With PERSIA_NATS_URL set, this is one rank of a job: data_compose.py sends the batches, and only rank 0 reports. A
job that is interrupted resumes after its newest checkpoint when it is restarted. With GPU_NUM set, each rank trains on
a separate CUDA device.
"""

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated

import census
import report
import torch
import typer

from persia import distributed, env
from persia.ctx import Checkpoints, TrainCtx, eval_ctx
from persia.data import DataLoader, IterableDataset, StreamingDataset
from persia.embedding.optim import Adam
from persia.errors import PersiaError
from persia.models import DLRM

EMBEDDING_DIM = 16  # the dimension of every slot in config/embedding_config.yml
VALIDATE_EVERY = 50  # steps
SAVE_EVERY = 100  # steps
EVALUATION_BATCH = 4096

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def evaluate(model: torch.nn.Module, dataset: IterableDataset) -> report.Quality:
    """Evaluate the model on a data set. Nothing is trained. Ids that did not occur in training have zero vectors."""
    logits, labels = [], []
    with eval_ctx(model=model) as ctx:
        for batch in DataLoader(dataset):
            output, (label,) = ctx.forward(batch)
            logits.append(output)
            labels.append(label)
    return report.Quality.of(torch.cat(logits), torch.cat(labels))


@app.command()
def main(
    seed: census.Seed = 0,
    epochs: census.Epochs = census.EPOCHS,
    batch_size: census.BatchSize = census.BATCH_SIZE,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate, which decreases linearly to 0.")] = 3e-3,
    staleness: Annotated[
        int, typer.Option(min=1, envvar="EMBEDDING_STALENESS", help="K: a look-up may miss up to K - 1 pushes.")
    ] = 4,
    reproducible: Annotated[
        bool, typer.Option(envvar="REPRODUCIBLE", help="Make equal runs bit-identical, with staleness 1.")
    ] = False,
    data: census.Data = census.DATA,
    out: Annotated[Path, typer.Option(envvar="PERSIA_RUN_DIR", help="Parent of the folder of the run.")] = Path("runs"),
) -> None:
    """Train a DLRM on Census-Income, then evaluate it once on the test split."""
    torch.set_num_threads(1)  # a model this small gains little from more threads, and loses much on a busy machine
    torch.manual_seed(seed)
    staleness = 1 if reproducible else staleness
    train, validation = census.training_data(data)
    test_set = census.Batches(census.read(data / "census_income_test.parquet"), EVALUATION_BATCH)
    validation_set = census.Batches(validation, EVALUATION_BATCH)
    train_set = census.Batches(train, batch_size, epochs, seed)

    model = DLRM(
        num_dense=len(census.DENSE),
        num_slots=len(census.SLOTS),
        embedding_dim=EMBEDDING_DIM,
        bottom_mlp=[64, EMBEDDING_DIM],
        top_mlp=[256, 64, 1],
    )
    device = env.get_local_rank() if int(os.environ.get("GPU_NUM") or 0) else None
    if device is not None:
        model.cuda(device)
    loss_fn = torch.nn.BCEWithLogitsLoss()
    dense_optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    embedding_optimizer = Adam(lr=lr)
    decay = torch.optim.lr_scheduler.LambdaLR(dense_optimizer, lambda step: 1 - step / len(train_set))

    in_job = bool(os.environ.get("PERSIA_NATS_URL"))
    saves = in_job and env.checkpoint_root() is not None  # in a job the servers write their part there too
    checkpoints = Checkpoints(every=SAVE_EVERY, state={"decay": decay}) if saves else None
    run = report.Run(out, f"seed{seed}", steps=len(train_set)) if env.get_rank() == 0 else None
    with run or contextlib.nullcontext():
        with TrainCtx(
            embedding_optimizer,
            dense_optimizer,
            mixed_precision=False,
            model=model,
            device_id=device,
            checkpoints=checkpoints,
        ) as ctx:
            if run is not None:
                run.goes_on_behind(ctx.step)
            source = StreamingDataset() if in_job else train_set
            loader = DataLoader(source, reproducible=reproducible, embedding_staleness=staleness)
            for batch in loader:
                output, labels = ctx.forward(batch)
                loss = loss_fn(output, labels[0])
                ctx.backward(loss)
                decay.step()
                embedding_optimizer.update_lr(float(decay.get_last_lr()[0]))
                if run is None:
                    continue
                run.step(loss.item(), samples=len(output) * env.get_world_size())
                if ctx.step % VALIDATE_EVERY == 0 or ctx.step == len(train_set):
                    run.validated(evaluate(model, validation_set))
            if run is not None:
                if not in_job:
                    ctx.dump_checkpoint(run.folder.absolute() / "checkpoint")
                elif saves:
                    ctx.dump_checkpoint(Path(run.folder.name, "checkpoint"))
                test, rows = evaluate(model, test_set), sum(ctx.get_embedding_size())
        if run is not None:
            run.finish(test, rows)
            distributed.report({"auc": test.auc, "log_loss": test.log_loss, "rows": rows})


if __name__ == "__main__":
    try:
        app()
    except PersiaError as error:
        typer.echo(f"error: {error}" + (f"\nnext:  {error.hint}" if error.hint else ""), err=True)
        sys.exit(error.exit_code)
