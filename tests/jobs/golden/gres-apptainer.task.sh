#!/bin/bash
# One process of a run. exec all the way: Slurm's signals must reach Python itself.
for name in PLIMSOLL_CACHE HF_HOME TRITON_CACHE_DIR TORCH_EXTENSIONS_DIR XDG_CACHE_HOME; do [ -n "${!name}" ] || export "$name="'/runs/a sweep/cache'/"$name"; done
allowed='^(SLURM_|SLURMD_|SUBMITIT_|PLIMSOLL_|PMI|MASTER_|NCCL_|GLOO_|UCX_|FI_|CUDA_|NVIDIA_|HF_|WANDB_|TRITON_|TORCH|OMP_|MKL_|VLLM_|TOKENIZERS_|TRANSFORMERS_|HYDRA_FULL_ERROR|XDG_CACHE_HOME|PYTHONNOUSERSITE|PYTHONSAFEPATH|LANG|LC_|TZ|MY_TOKEN$)'
for name in $(compgen -e); do
  [[ $name =~ $allowed ]] && export "APPTAINERENV_$name=${!name}"
done
export APPTAINERENV_PYTHONPATH='/runs/a sweep/code'
exec apptainer --silent exec --cleanenv --no-home --no-mount home,cwd --nv --bind /scratch:/scratch:ro --bind '/data/it'"'"'s' --bind /models --bind '/runs/a sweep/code:/runs/a sweep/code:ro' --pwd "$PLIMSOLL_RUN" '/images/plimsoll v1.sif' env --block-signal=USR2 --block-signal=TERM "$@"
