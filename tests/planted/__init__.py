"""Problems planted into small real runs, each with what a diagnosis should say of it: `python -m benchmarks.planted`.

A problem is a setting of a recipe, or a fault around a part of the run (`faults.py`); trainer, engine and diagnosis
know nothing of either.
"""
