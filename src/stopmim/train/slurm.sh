#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={gpus}
#SBATCH --gpus-per-node={gpus}
#SBATCH --output={log}
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@{grace}
{options}
# Time is nearly up: the ranks save and exit, and the job is requeued.
trap 'requeue=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1

export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE={gpus}
cpus=${{SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}}  # srun does not inherit it
srun --kill-on-bad-exit=1 $cpus \
  bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec "$@"' rank \
  {command} &
step=$!
wait $step; code=$?
while kill -0 $step 2> /dev/null; do wait $step; code=$?; done  # a signal interrupts wait
# Preempted with time to save: SLURM does not requeue jobs that exit. Cancelled jobs stay out.
about=$(scontrol show job "$SLURM_JOB_ID")
if [[ $code -gt 128 && $about == *JobState=RUNNING* && $about == *PreemptTime=[0-9]* ]]; then
  requeue=yes
fi
if [ "$requeue" = yes ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
