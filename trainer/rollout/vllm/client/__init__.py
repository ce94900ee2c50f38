"""The engine ``vllm_server``: vLLM servers, the threads that supervise them, and their clients.

Reading order: ``engine``, ``generation`` and ``stream`` (one call to one server); ``pool`` (where a
rank's servers are) and ``node_servers`` (all servers of a node); ``supervisor`` (one server,
restarted when it fails), ``server_process``, ``weight_store`` and ``status_file``. ``spec`` holds
settings, ``json_request`` sends HTTP requests.
"""
