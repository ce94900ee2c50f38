"""What every package uses. No torch.

Errors and exit codes: ``errors``. The process: ``environment``, ``rank_info``, ``signals``,
``library_logs``, ``connections``, ``forked`` (child processes). Files: ``run_folder``,
``metrics_file``, ``atomic``, ``data_files`` with its tables. The machine and the model:
``memory``, ``precision``, ``model_shape``, ``length_limit``. A user's own code: ``user_code``.
"""
