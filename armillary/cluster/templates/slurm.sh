#!/bin/bash
{% for option in options -%}
#SBATCH {{ option }}
{% endfor -%}
# job {{ job.name }}; written by armillary launch

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol --oneliner show node "$head" | sed 's/.* NodeAddr=\([^ ]*\).*/\1/')
{% for name, value in environment -%}
export {{ name }}={{ value }}
{% endfor -%}
{% for line in job.launch.setup -%}
{{ line }}
{% endfor %}
# Slurm sends USR1 before the time limit: the ranks save and end, and the job goes back into the queue.
signalled=
trap 'signalled=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
srun {{ step_options }} {{ command }} &
step=$!
wait $step
code=$?
while [ -n "$signalled" ] && kill -0 $step 2>/dev/null; do
  wait $step
  code=$?
done
{% if job.launch.requeue -%}
if [ -n "$signalled" ]; then
  echo "time limit: job $SLURM_JOB_ID goes back into the queue"
  scontrol requeue "$SLURM_JOB_ID"
fi
{% endif -%}
exit $code
