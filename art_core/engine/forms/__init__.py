"""How base models write what is more than text: calls of tools, and thoughts.

`answer_form.py` chooses what a model's answers are read by; `table.py` lists the forms of calls.
"""
