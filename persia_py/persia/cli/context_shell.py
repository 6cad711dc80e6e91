"""``persia debug shell`` and ``notebook``: a container of the trainer's image with a copy of a folder."""

from pathlib import Path
from typing import Annotated

import typer

Context = Annotated[Path, typer.Option("--context", metavar="DIR", help="The folder to work on.")]
Mount = Annotated[
    bool, typer.Option("--mount", help="Mount the folder itself, not a copy: changes in the container change it.")
]


def shell(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[-- COMMAND]", help="Run this command instead of a shell.")
    ] = None,
    context: Context = Path(),
    mount: Mount = False,
    full_stack: Annotated[bool, typer.Option("--stack", help="Join the running stack: its NATS and servers.")] = False,
) -> None:
    """Open a shell in the trainer's image, with a copy of a folder as /workspace. .persiaignore excludes files."""
    from persia.doctor import context as contexts

    raise typer.Exit(contexts.run(context, [*(words or ["bash"])], mount=mount, stack=full_stack))


def notebook(
    context: Context = Path(),
    mount: Mount = False,
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port of the notebook on this host.")] = 8888,
) -> None:
    """Start a notebook in the trainer's image, and print its address. The image must contain the package jupyterlab."""
    import secrets
    import webbrowser

    from persia.doctor import notebook as notebooks

    token = secrets.token_urlsafe(24)
    url = f"http://127.0.0.1:{port}/lab?token={token}"

    def ready() -> None:
        typer.echo(f"notebook: {url}")
        webbrowser.open(url)

    raise typer.Exit(notebooks.run(context, port, token, mount=mount, ready=ready))
