"""Commands with ``--set``. If a key of ``persia.yml`` is given as an option, the error suggests ``--set``."""

from typing import Any

from typer.core import TyperCommand

from persia.runtime.errors import UsageError


class KeysCommand(TyperCommand):
    """A command with the option ``--set``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments.

        Raises:
            UsageError: An option does not exist, and is the name of a key.
        """
        known = {name for param in self.get_params(ctx) for name in (*param.opts, *param.secondary_opts)}
        for place, word in enumerate(args):
            option, equals, value = word.partition("=")
            if word == "--":
                break
            if option.startswith("--") and option not in known:
                following = args[place + 1 : place + 2]
                given = value if equals else next((each for each in following if not each.startswith("-")), "VALUE")
                _refuse(ctx.command_path, option, given)
        return super().parse_args(ctx, args)


def _refuse(command: str, option: str, value: str) -> None:
    from persia.config.keys import keys_like

    keys = keys_like(option)
    if not keys:
        return  # no key of persia.yml: the parser of the command reports the option, with similar options
    raise UsageError(
        f"{command}: there is no option {option}; --set changes {' or '.join(keys)} of persia.yml",
        hint=" or ".join(f"--set {key}={value}" for key in keys),
    )
