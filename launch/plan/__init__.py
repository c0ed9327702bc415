"""Predicts the size of a model's sessions, the codec that will serve it, and how many sessions fit.

``launch/families`` turns config.json into the shape of the caches. From that ``served_model.py``
computes the size of live KV and ``cold_size.py`` that of packed KV, and ``capacity_plan.py`` makes
the plan of ``thermocline plan``. ``fit.py`` chooses budgets for a given number of sessions, and
``machines.py`` plans for other machines.
"""
