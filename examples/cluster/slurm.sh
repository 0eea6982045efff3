#!/usr/bin/env bash
# A run over the nodes of one Slurm job: Ray's head on the first node, a worker on each other one, then `roll run`.
#
#   sbatch --nodes=3 --gpus-per-node=8 examples/cluster/slurm.sh CONFIG [key=value ...]
#
# Submit it from the repository, whose folder all nodes must see, as they must see output_dir and local data files.
#SBATCH --job-name=roll
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
set -euo pipefail

port=${RAY_PORT:-6379} wait_s=${RAY_WAIT_S:-300}
bin=${ROLL_BIN:-$PWD/.venv/bin}
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
head=${nodes[0]}
on() { srun --nodes=1 --ntasks=1 --overlap --nodelist="$1" "${@:2}"; }
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # srun does not take it over from sbatch
address=$(on "$head" getent ahostsv4 "$head" | awk '{print $1; exit}')
export RAY_USAGE_STATS_ENABLED=0 RAY_ADDRESS="$address:$port"

# until COMMAND succeeds, for at most wait_s
wait_for() {
    local what=$1 end=$((SECONDS + wait_s))
    until "${@:2}" >/dev/null 2>&1; do
        ((SECONDS < end)) || { echo "$what within $wait_s s" >&2; exit 1; }
        sleep 2
    done
}
joined() {
    local count='import ray; ray.init(log_to_driver=False); print(sum(node["Alive"] for node in ray.nodes()))'
    [ "$("$bin/python" -c "$count")" = "${#nodes[@]}" ]
}

# `ray start --block` keeps a node until the job ends; Slurm then ends every process of the job.
on "$head" env -u RAY_ADDRESS "$bin/ray" start --head --block --node-ip-address="$address" --port="$port" &
wait_for "Ray did not start on $head" "$bin/ray" status
for node in "${nodes[@]:1}"; do
    on "$node" "$bin/ray" start --address="$RAY_ADDRESS" --block &
done
wait_for "not all of ${nodes[*]} joined Ray" joined

on "$head" "$bin/roll" run "$@"
