"""PersiaML's path of small things that its scripts use."""

from persia.embedding.data import split_mask
from persia.launch.host import dump_yaml, find_free_port, load_yaml, resolve_binary_execute_path, run_command
from persia.runtime.seeding import setup_seed

__all__ = [
    "dump_yaml",
    "find_free_port",
    "load_yaml",
    "resolve_binary_execute_path",
    "run_command",
    "setup_seed",
    "split_mask",
]
