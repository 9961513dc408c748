# shellcheck shell=bash
# What all scripts of this folder need of the cluster: edit it once. They source it in the folder of sbatch.

# Python with lightning_zero, one of:
# module load cuda/12.8 python/3.12
# source "$HOME/miniforge3/bin/activate" my-environment
if [ -f .venv/bin/activate ]; then source .venv/bin/activate; fi

# What starts the ranks: srun, or srun into a container in which lightning_zero is, one of:
launch=(srun)
# launch=(srun --container-image="$PWD/zero.sqsh" --container-mounts="$PWD" --container-workdir="$PWD")  # enroot, pyxis
# launch=(srun apptainer exec --nv --bind "$PWD" --pwd "$PWD" zero.sif)

export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}  # srun of 22.05 and later does not inherit it

export NCCL_DEBUG=${NCCL_DEBUG:-WARN}  # sbatch --export=ALL,NCCL_DEBUG=INFO tells which links are used
# Where nodes have several networks, the one that NCCL and gloo are to use:
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
