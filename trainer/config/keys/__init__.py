"""The keys themselves: their names, defaults and types in words.

Read ``conf_tree`` (where ``conf/`` lies), ``tree`` (keys and defaults in ``conf/config.yaml``),
``derived`` (keys written ``${...}``), then ``fields`` and ``describe``, which look into the schema.
``dotted`` reads and changes nested mappings by dotted key.
"""
