"""Predicts what a model's sessions take, which codec will serve it, and how many sessions fit.

``launch/families`` turns config.json into a shape of caches; from that ``served_model.py`` counts
live KV and ``cold_size.py`` packed KV; ``capacity_plan.py`` puts them together for
``thermocline plan``. By it ``fit.py`` chooses budgets for as many sessions as are wished, and
``machines.py`` looks at other machines.
"""
