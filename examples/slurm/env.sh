# shellcheck shell=bash
# Settings of your cluster for all scripts in this folder. The scripts source this file in the folder of sbatch.

# Python environment with lightning_zero, one of:
# module load cuda/12.8 python/3.12
# source "$HOME/miniforge3/bin/activate" my-environment
if [ -f .venv/bin/activate ]; then source .venv/bin/activate; fi

# Command that starts the ranks: srun, or srun with a container that includes lightning_zero, one of:
launch=(srun)
# launch=(srun --container-image="$PWD/zero.sqsh" --container-mounts="$PWD" --container-workdir="$PWD")  # enroot, pyxis
# launch=(srun apptainer exec --nv --bind "$PWD" --pwd "$PWD" zero.sif)

export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}  # srun of 22.05 and later does not inherit it

export NCCL_DEBUG=${NCCL_DEBUG:-WARN}  # sbatch --export=ALL,NCCL_DEBUG=INFO prints the links in use
# Network for NCCL and gloo, if nodes have several:
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
