"""How built-in rules read a response and compare it with the truth.

Read in this order: ``final_answer`` (where a response states its answer), ``plain_text`` (without
markdown and LaTeX's dressing), ``quantities`` (numbers), ``lists``, ``equality`` (all of them
together, for the maths rule).
"""
