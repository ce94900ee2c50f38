#!/bin/bash
# One process of a run. exec all the way: Slurm's signals must reach Python itself.
for name in PLIMSOLL_CACHE HF_HOME TRITON_CACHE_DIR TORCH_EXTENSIONS_DIR XDG_CACHE_HOME; do [ -d "${!name}" ] || export "$name="'/runs/a sweep/cache'/"$name"; done
allowed='^(SLURM_|SLURMD_|SUBMITIT_|PLIMSOLL_|PMI|MASTER_|CUDA_|OMP_|MKL_|TORCH|PYTHONNOUSERSITE$|PYTHONSAFEPATH$|LANG$|LANGUAGE$|LC_|TZ$|NO_COLOR$|http_proxy$|https_proxy$|ftp_proxy$|all_proxy$|no_proxy$|HTTP_PROXY$|HTTPS_PROXY$|FTP_PROXY$|ALL_PROXY$|NO_PROXY$|WANDB_|HF_|HUGGINGFACE_|HUGGING_FACE_|TRANSFORMERS_|TOKENIZERS_|NCCL_|GLOO_|UCX_|FI_|NVIDIA_|VLLM_|TRITON_|TORCH_|TORCHINDUCTOR_|PYTORCH_|XDG_CACHE_HOME$|PLIMSOLL_CACHE$|HYDRA_FULL_ERROR$|MY_TOKEN$)'
for name in $(compgen -e); do
  [[ $name =~ $allowed ]] && export "APPTAINERENV_$name=${!name}"
done
export APPTAINERENV_PYTHONPATH='/runs/a sweep/code/c0de'
exec apptainer --silent exec --cleanenv --no-home --no-mount home,cwd --nv --bind /scratch:/scratch:ro --bind '/data/it'"'"'s' --bind /models --bind '/runs/a sweep/code/c0de:/runs/a sweep/code/c0de:ro' --pwd "$PLIMSOLL_RUN" '/images/plimsoll v1.sif' env --block-signal=USR2 --block-signal=TERM "$@"
