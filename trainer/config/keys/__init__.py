"""The keys themselves: their names, defaults, types in words, and verl's other spellings.

Read ``conf_tree`` (where ``conf/`` lies), ``tree`` (keys and defaults in ``conf/config.yaml``),
``derived`` (keys written ``${...}``), ``verl`` (tables of verl's keys), then ``fields`` and
``describe``, which look into the schema. ``dotted`` reads and changes nested mappings by dotted
key.
"""
