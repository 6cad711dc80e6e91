# MindSpeed's name of dist_debug.sh for PyTorch: there is one file for both.
. "$(dirname "${BASH_SOURCE:-$0}")/dist_debug.sh"
