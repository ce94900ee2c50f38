"""verl's command lines: what each of its settings becomes here. Imports neither the schema nor
torch.

``names`` (keys and values that are called otherwise here), ``accepted`` (settings that change
nothing here), ``refused`` (those that are not supported, with the reason), ``translate`` (one
setting through these tables), ``script`` (the settings of a shell script) and ``__main__``
(``python -m trainer.config.verl SCRIPT.sh``).
"""
