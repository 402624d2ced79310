#!/usr/bin/env bash
# One plain job with torchrun in place of vgen's own supervisor, where a site or a tool asks for it.
#
#   python -m vgen.run launcher.dry_run=true parallel=pvs8 ...     # checks the job, writes <folder>/job.json
#   launchers/torchrun.sh <folder>/job.json 8                      # as many ranks as the job asks for
#   launchers/torchrun.sh job.json 8 --nnodes=2 --node-rank=1 --master-addr=host0 --master-port=29500
#
# What follows the number of ranks on this machine goes to torchrun. PYTHON=/path/to/python picks the environment.

set -euo pipefail

if [[ $# -lt 2 || ! -f $1 || ! $2 =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: $0 JOB_JSON RANKS_ON_THIS_MACHINE [torchrun options]" >&2
    exit 2
fi
job=$1
ranks=$2
shift 2
if [[ $# -eq 0 ]]; then
    set -- --standalone # one machine: torchrun looks for a free port
fi
exec "${PYTHON:-python}" -m torch.distributed.run --nproc-per-node="$ranks" "$@" --module vgen.worker "$job"
