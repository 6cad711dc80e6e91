# Run a launch script of several ranks under the debugger. One rank is in the foreground and stops at breakpoint_().
# In the script, after its variables and before its launch line:
#
#     run_pretrain() { python pretrain.py $GPT_ARGS; }   # the command and its arguments, unchanged
#     source dist_debug.sh
#     exit
# Without run_pretrain and `exit`, the launch line after `source` (torchrun, or python -m torch.distributed.run) runs under the debugger.
# RANK_TO_DEBUG is the rank that stops (default 0). NPUS_PER_NODE or GPU_NUM is the number of ranks on this host. NNODES,
# NODE_RANK, MASTER_ADDR and MASTER_PORT describe the hosts. The output of the other ranks is in logs/rank-N.log.

_persia_ranks=${NPUS_PER_NODE:-${GPU_NUM:-}}

_persia_debug() { persia debug run --rank "${RANK_TO_DEBUG:-0}" "$@"; }

_persia_script() { # FILE ARGUMENT..., or -m MODULE ARGUMENT...
    if [ "${NNODES:-1}" -gt 1 ]; then
        _persia_debug -- torchrun --nnodes "$NNODES" --node-rank "${NODE_RANK:-0}" --master-addr "$MASTER_ADDR" \
            --master-port "$MASTER_PORT" --nproc-per-node "${_persia_ranks:-1}" "$@"
    else
        _persia_debug ${_persia_ranks:+--nproc "$_persia_ranks"} -- "$@"
    fi
}

_persia_python() { # PROGRAM ARGUMENT...
    case "${_persia_wraps:-} ${2:-} ${3:-}" in
    *'-m torch.distributed.run' | *'-m torch.distributed.launch') _persia_debug -- "$@" ;;
    '1 '*) shift && _persia_script "$@" ;;
    *) command "$@" ;;
    esac
}

torchrun() { _persia_debug -- torchrun "$@"; }
python() { _persia_python python "$@"; }
python3() { _persia_python python3 "$@"; }

if command -v run_pretrain >/dev/null; then
    _persia_wraps=1
    run_pretrain
    return
fi
echo 'dist_debug: torchrun and python -m torch.distributed.run run under persia debug run from here on. If the next line is' \
    '`exit`, nothing runs: define run_pretrain before this file is read' >&2
