# MindSpeed's name of dist_debug.sh for PyTorch. Both scripts do the same.
. "$(dirname "${BASH_SOURCE:-$0}")/dist_debug.sh"
