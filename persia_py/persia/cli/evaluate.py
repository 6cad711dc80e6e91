"""``persia eval``: evaluate a trained model."""

from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, runs/LATEST, or a checkpoint in a run.")],
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE]...", help="Files with labels. Default: the test set, else the validation set."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Evaluate a trained model on files with labels."""
    import json

    from persia.runtime.interruptible import interruptible

    with interruptible():
        from persia.cli.quiet import only_warnings
        from persia.trainer import Trainer
        from persia.trainer.progress import show_evaluation
        from persia.trainer.run_folder import find_checkpoint

    only_warnings()
    found = find_checkpoint(run)
    with Trainer(found.folder.config()) as trainer:
        report = trainer.resume(run).evaluate(files or None)
    if as_json:
        what = {"run": str(found.folder.path), "checkpoint": str(found.checkpoint), "part": report.part}
        results = {**what, "files": [*report.files], **report.results()}
        typer.echo(json.dumps(results, ensure_ascii=False))
    else:
        show_evaluation(report, found)
