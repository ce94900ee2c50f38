"""What passes of the submitting environment: to Slurm's commands, into a job, and into an image.

The only list of such names. Whatever else the submitting shell holds (options of sbatch, variables
of an enclosing job or of another launcher) reaches none of them. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

LOCATES_CLUSTER = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
"""Variables of Slurm's commands that say which cluster, and as whom; all others are options."""
CLIENT_OPTIONS = (
    *("SLURM_*", "SLURMD_*", "SBATCH_*", "SRUN_*", "SALLOC_*", "SQUEUE_*", "SINFO_*", "SACCT_*"),
    *("SCANCEL_*", "SCONTROL_*"),
)
"""Options of Slurm's commands, and what an allocation leaves in a shell. ``X*`` is a prefix."""

ON_THE_HOST = (
    # who and where
    *("HOME", "USER", "LOGNAME", "SHELL", "PATH", "KRB5CCNAME"),
    # what module load has set, and the function that it is
    *("LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "CC", "CXX", "CUDA_HOME", "CUDA_PATH"),
    *("MODULE*", "LMOD*", "__LMOD*", "_ModuleTable*", "__MODULES*", "LOADEDMODULES", "_LMFILES_"),
    *("BASH_ENV", "BASH_FUNC_*"),
    # certificates: paths of this machine
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)
"""Names that pass into a job, but not into an image, which has its own."""
EVERYWHERE = (
    *("LANG", "LANGUAGE", "LC_*", "TZ", "NO_COLOR"),
    *("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"),
    *("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("WANDB_*", "HF_*", "HUGGINGFACE_*", "HUGGING_FACE_*", "TRANSFORMERS_*", "TOKENIZERS_*"),
    *("NCCL_*", "GLOO_*", "UCX_*", "FI_*", "NVIDIA_*", "VLLM_*", "TRITON_*"),
    *("TORCH_*", "TORCHINDUCTOR_*", "PYTORCH_*"),
    *("XDG_CACHE_HOME", "PLIMSOLL_CACHE", "HYDRA_FULL_ERROR"),
)
"""Names that pass into a job and into its image."""
NEVER = (
    *("WANDB_RUN_ID", "WANDB_RUN_GROUP", "WANDB_NAME", "WANDB_RESUME", "WANDB_SWEEP_ID"),
    *("WANDB_SERVICE", "WANDB__*", "VLLM_HOST_IP", "VLLM_PORT", "VLLM_DP_*"),
)
"""Names of one run, which pass although a list above has their prefix."""
OF_THE_JOB = (
    *("SLURM_*", "SLURMD_*", "SUBMITIT_*", "PLIMSOLL_*", "PMI*", "MASTER_*", "CUDA_*"),
    *("OMP_*", "MKL_*", "TORCH*", "PYTHONNOUSERSITE", "PYTHONSAFEPATH"),
)
"""Names that Slurm, the batch script and the site's setup set in a job, and that its image sees."""

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What tells a process its rank: in a shell, left over from another launcher."""
RUN_VARIABLES = (
    *("PLIMSOLL_ATTEMPT", "PLIMSOLL_GIT_COMMIT", "PLIMSOLL_IMAGE_DIGEST", "PLIMSOLL_JOB"),
    *("PLIMSOLL_LAUNCH", "PLIMSOLL_LAUNCHED", "PLIMSOLL_PARENT_FD", "PLIMSOLL_ROLLOUT_NODES"),
    *("PLIMSOLL_RUN", "PLIMSOLL_SLURM", "PLIMSOLL_TERMINAL", "PLIMSOLL_VLLM_SECRET"),
)
"""Our own variables of one run."""
NOTICED = (
    *LAUNCHER,
    *RUN_VARIABLES,
    *("CUDA_VISIBLE_DEVICES", "OMP_*", "MKL_*", "PYTHONPATH", "PYTHONHOME", "LD_PRELOAD", "TMPDIR"),
    *("APPTAINERENV_*", "SINGULARITYENV_*", "APPTAINER_BIND*", "SINGULARITY_BIND*"),
    *NEVER,
)
"""Names that someone may expect to act: that they don't pass is told."""


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether ``name`` is one of ``patterns``; one that ends in ``*`` is a prefix."""
    return any(name.startswith(one[:-1]) if one.endswith("*") else name == one for one in patterns)


def passes(name: str, named: Iterable[str]) -> bool:
    """Whether the variable ``name`` of the submitting shell reaches a job. ``named``: further names
    of the site profile (``cluster.env``).
    """
    if name in LOCATES_CLUSTER or name in named:
        return True
    return matches(name, (*ON_THE_HOST, *EVERYWHERE)) and not matches(name, NEVER)


def left_behind(env: Mapping[str, str], named: Iterable[str]) -> list[str]:
    """Names of ``env`` that sbatch doesn't get."""
    allowed = tuple(named)
    return sorted(name for name in env if not passes(name, allowed))


def client_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of Slurm's commands that submit nothing: without their options."""
    return {
        name: value
        for name, value in env.items()
        if name in LOCATES_CLUSTER or not matches(name, CLIENT_OPTIONS)
    }


def run_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a run on this machine: without an allocation's variables, and those of
    another launcher or run.
    """
    leaked = (*CLIENT_OPTIONS, *LAUNCHER, *RUN_VARIABLES, *NEVER)
    return {name: value for name, value in env.items() if not matches(name, leaked)}


def notices(
    env: Mapping[str, str], named: Iterable[str], planned: Mapping[str, object]
) -> list[str]:
    """What of the submitting shell is not used although someone may expect it, one line each.

    ``planned``: long option of sbatch -> its value in the plan.
    """
    allowed = tuple(named)
    lines = []
    for name in sorted(env):
        if matches(name, ("SBATCH_*",)):
            option = _option_of(name)
            plan = "the plan doesn't set it (cluster.sbatch_args)"
            if option == "no-requeue":
                plan = "jobs are queued again as hydra.launcher.max_* say"
            elif option in planned:
                plan = f"the plan says --{option}={planned[option]}"
            lines.append(f"{name}={env[name]} in your environment is not used: {plan}")
    hidden = [name for name in left_behind(env, allowed) if matches(name, NOTICED)]
    if hidden:
        lines.append(
            f"not passed to the jobs: {', '.join(hidden)} (cluster.env=[NAME] passes a variable)"
        )
    return lines


def _option_of(name: str) -> str:
    """The long option that a variable ``SBATCH_*`` stands for."""
    word = name.removeprefix("SBATCH_")
    special = {"TIMELIMIT": "time", "ARRAY_INX": "array", "MEM_PER_NODE": "mem"}
    return special.get(word, word.lower().replace("_", "-"))
