"""vLLM servers on nodes that train nothing, for ranks on other nodes.

Reading order: ``remote_pool`` (the ranks' side); ``agent``, ``agent_http`` and ``agent_process``
(on the servers' node); ``weight_upload`` (weights between the two). How they find each other, and
end together, is in ``trainer.launch.rollout_nodes``.
"""
