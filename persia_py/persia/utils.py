"""The import path of PersiaML for small functions that its scripts use."""

from persia.embedding.data import split_mask
from persia.launch.binaries import resolve_binary_execute_path
from persia.launch.local_job import find_free_port
from persia.launch.process import run_command
from persia.launch.yaml_files import dump_yaml, load_yaml
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
