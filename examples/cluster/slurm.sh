#!/usr/bin/env bash
# A run over the nodes of one Slurm job: Ray's head on the first node, a worker on each other one, then `roll run`.
#
#   sbatch --nodes=2 --gpus-per-node=8 examples/cluster/slurm.sh CONFIG [key=value ...]
#
# Submit it from the repository, whose folder all nodes must see, as they must see output_dir and local data files.
#SBATCH --job-name=roll
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
set -euo pipefail

port=${RAY_PORT:-6379}
bin=${ROLL_BIN:-$PWD/.venv/bin}
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
head=${nodes[0]}
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')
export RAY_USAGE_STATS_ENABLED=0 RAY_ADDRESS="$address:$port"

# `ray start --block` keeps a node until the job ends; Slurm then ends every process of the job.
srun --nodes=1 --ntasks=1 --overlap --nodelist="$head" \
    env -u RAY_ADDRESS "$bin/ray" start --head --block --node-ip-address="$address" --port="$port" &
until "$bin/ray" status >/dev/null 2>&1; do sleep 2; done
for node in "${nodes[@]:1}"; do
    srun --nodes=1 --ntasks=1 --overlap --nodelist="$node" "$bin/ray" start --address="$RAY_ADDRESS" --block &
done
until [ "$("$bin/python" -c 'import ray; ray.init(log_to_driver=False); print(len([n for n in ray.nodes() if n["Alive"]]))' 2>/dev/null)" = "${#nodes[@]}" ]; do
    sleep 2
done

srun --nodes=1 --ntasks=1 --overlap --nodelist="$head" "$bin/roll" run "$@"
